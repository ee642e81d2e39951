import pytest
import torch

from sglang_dflash.ops.kernels.linear_int8 import launch, linear_int8
from sglang_dflash.ops.reference.linear_int8 import linear_int8 as reference
from sglang_dflash.ops.reference.linear_int8 import max_rows, quantize_columns


def operands(rows: int, columns: int, depth: int, is_gated: bool, dtype: torch.dtype, device: str):
    """Return x, with outliers and a row of zeros, the weight, with a column of zeros, and its int8 copy."""
    # A view of a wider matrix, as queries are of a projection. Reading the other columns would change the result.
    x = torch.full((rows, depth + 8), 100.0, device=device, dtype=dtype)[:, :depth]
    x.copy_(torch.randn(rows, depth))
    x[:, 5] *= 30
    x[rows // 2] = 0 if rows > 1 else 1
    weight = torch.randn((1 + is_gated) * columns, depth, device=device) / depth**0.5
    weight[columns // 2] = 0
    weight = weight.to(dtype)
    return x, weight, *quantize_columns(weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [(1, 1, 256), (3, 200, 256), (16, 64, 512), (17, 130, 768), (32, 65, 1024), (64, 63, 256)],
)
def test_matches_reference(rows, columns, depth, is_gated, dtype, device):
    x, _, weight8, scales = operands(min(rows, max_rows(is_gated)), columns, depth, is_gated, dtype, device)
    got, want = linear_int8(x, weight8, scales, is_gated), reference(x, weight8, scales, is_gated)
    assert got.dtype == dtype
    # Triton's interpreter truncates to bfloat16 where a GPU rounds. Both halves of a gated layer are rounded too.
    # Where the parts' products cancel, float32's rounding remains.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got, want, rtol=4 * eps, atol=4 * eps if is_gated else eps / 16)


@pytest.mark.parametrize("is_gated", [False, True])
def test_any_tiles(is_gated, device):
    x, _, weight8, scales = operands(20, 150, 512, is_gated, torch.float16, device)
    want = reference(x, weight8, scales, is_gated)
    for tiles in [(32, 512, 4, 3), (64, 128, 8, 4), (128, 128, 8, 3)]:
        torch.testing.assert_close(launch(x, weight8, scales, is_gated, *tiles), want, rtol=2**-8, atol=2**-8)


def test_rows_keep_their_precision(device):
    """Only the weights are rounded to 8 bits: the result is that of the weights which the copy stands for."""
    x, _, weight8, scales = operands(16, 64, 1024, False, torch.float16, device)
    want = x.double() @ (weight8.double() * scales[:, None].double()).T
    got = linear_int8(x, weight8, scales, False).double()
    assert (got - want).norm() < 3e-4 * want.norm()


def test_copy_is_close(device):
    _, weight, weight8, scales = operands(1, 64, 1024, False, torch.bfloat16, device)
    difference = (weight.float() - weight8 * scales[:, None]).abs()
    assert (difference <= 0.501 * scales[:, None]).all()
    assert weight8.abs().amax(dim=-1).tolist() == [127 * (i != 32) for i in range(64)]


@pytest.mark.parametrize(("rows", "depth"), [(33, 256), (16, 128), (16, 300)])
def test_unsupported_shapes_are_refused(rows, depth, device):
    weight8 = torch.zeros(64, depth, dtype=torch.int8, device=device)
    with pytest.raises(AssertionError):
        linear_int8(torch.zeros(rows, depth, device=device).bfloat16(), weight8, torch.ones(64, device=device), False)
