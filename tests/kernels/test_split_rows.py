import pytest
import torch

from sglang_dflash.ops.kernels.split_rows import split_rows
from sglang_dflash.ops.reference.split_rows import LOW_STEPS
from sglang_dflash.ops.reference.split_rows import split_rows as reference


def rows_of(rows: int, depth: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return rows of many sizes, with outliers and a row of zeros, as a view of a wider matrix."""
    x = torch.full((rows, depth + 8), 1000.0, device=device, dtype=dtype)[:, :depth]
    x.copy_(torch.randn(rows, depth) * torch.logspace(-2, 2, rows)[:, None])
    x[:, depth // 2] *= 20
    x[rows // 2] = 0
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "depth"), [(1, 1), (3, 64), (16, 520), (17, 8), (64, 300), (128, 1024)])
def test_matches_reference(rows, depth, dtype, device):
    x = rows_of(rows, depth, dtype, device)
    got, want = split_rows(x), reference(x)
    assert torch.equal(got.parts, want.parts)
    assert torch.equal(got.scales, want.scales)
    torch.testing.assert_close(got.norms, want.norms)
    torch.testing.assert_close(got.errors, want.errors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_stand_for_rows(dtype, device):
    x = rows_of(33, 700, dtype, device)
    parts, scales, norms, errors = split_rows(x)
    found = scales[:, None].double() * (parts[0].double() + parts[1].double() / LOW_STEPS)
    difference = x.double() - found
    torch.testing.assert_close(norms.double(), x.double().norm(dim=-1), rtol=1e-5, atol=0)
    torch.testing.assert_close(errors.double(), difference.norm(dim=-1), rtol=1e-2, atol=0)
    # Half a step of the low part, and float32's rounding.
    assert (difference.abs() <= 0.51 / LOW_STEPS * scales[:, None]).all()
    assert scales[16] == norms[16] == errors[16] == 0 and not parts[:, 16].any()


def test_tiny_rows_are_zeros(device):
    """Their scale has no inverse in float32. The error is the whole row."""
    x = torch.full((2, 5), 1e-38, dtype=torch.bfloat16, device=device)
    parts, scales, _, errors = split_rows(x)
    assert not parts.any() and not scales.any() and torch.equal(errors, reference(x).errors)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_scales_show_broken_rows(number, device):
    x = torch.ones(3, 40, dtype=torch.bfloat16, device=device)
    x[1, 7] = number
    assert split_rows(x).scales.isfinite().tolist() == reference(x).scales.isfinite().tolist() == [True, False, True]
