import pytest
import torch

from sglang_dflash.ops.kernels.linear_few_rows import linear_few_rows
from sglang_dflash.ops.reference.linear_few_rows import linear_few_rows as reference

# Triton's interpreter multiplies the bits of bfloat16 numbers as if they were integers.
DTYPES = [torch.float16, torch.bfloat16] if torch.cuda.is_available() else [torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [
        (1, 1, 1),
        (16, 64, 128),
        (16, 130, 520),
        (7, 200, 8),
        (15, 63, 300),
        (29, 130, 520),
        (33, 65, 1024),
        (64, 64, 130),
    ],
)
def test_matches_reference(rows, columns, depth, is_gated, dtype, device):
    compare(rows, columns, depth, is_gated, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(65, 96, 64), (101, 288, 320), (128, 192, 512)])
def test_many_gated_rows(rows, columns, depth, dtype, device):
    compare(rows, columns, depth, True, dtype, device)


def compare(rows, columns, depth, is_gated, dtype, device):
    # A view of a wider matrix, as queries are of a projection. Reading the other columns would change the result.
    x = torch.full((rows, depth + 8), 100.0, device=device, dtype=dtype)[:, :depth]
    x.copy_(torch.randn(rows, depth))
    weight = torch.randn((1 + is_gated) * columns, depth, device=device).to(dtype) / depth**0.5
    got, want = linear_few_rows(x, weight, is_gated), reference(x, weight, is_gated)
    # Sums in another order round to a neighbour. So do the halves of a gated layer, before they are multiplied.
    torch.testing.assert_close(got, want, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "is_gated"),
    [(65, 64, 64, False), (129, 192, 64, True), (65, 128, 64, True), (65, 192, 32, True)],
)
def test_unsupported_shapes_are_refused(rows, columns, depth, is_gated, device):
    with pytest.raises(AssertionError):
        linear_few_rows(torch.zeros(rows, depth, device=device), torch.zeros(columns, depth, device=device), is_gated)
