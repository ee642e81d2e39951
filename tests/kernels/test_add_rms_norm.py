import pytest
import torch

from sglang_dflash.ops.kernels.add_rms_norm import add_rms_norm
from sglang_dflash.ops.reference.add_rms_norm import add_rms_norm as reference


@pytest.mark.parametrize(("rows", "size"), [(0, 64), (1, 1), (3, 100), (17, 576), (5, 2560), (2, 4096), (1, 8192)])
@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
@pytest.mark.parametrize(("dtype", "is_early"), [(torch.float32, False), (torch.bfloat16, True)])
def test_matches_reference(rows, size, weight_offset, dtype, is_early, device):
    x, residual = torch.randn(2, rows, size, device=device).to(dtype)
    weight = torch.randn(size, device=device).to(dtype)
    want = x.clone(), residual.clone()
    add_rms_norm(x, residual, weight, 1e-2, weight_offset, is_early)
    reference(*want, weight, 1e-2, weight_offset, is_early)
    # bf16: Triton's interpreter truncates where a GPU rounds. On a GPU, sums in another order round to a neighbour.
    bound = 2e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(x, want[0], rtol=bound, atol=bound)
    torch.testing.assert_close(residual, want[1], rtol=bound, atol=bound)


@pytest.mark.parametrize("apply", [add_rms_norm, reference])
def test_the_sum_is_normed_before_it_is_rounded(apply, device):
    """A sum just below 1 rounds to 1 in the residual, but the norm is computed from the unrounded sum."""
    x = torch.tensor([[2**-10, 0.0]], device=device, dtype=torch.bfloat16)
    residual = torch.tensor([[1.0, 1.0]], device=device, dtype=torch.bfloat16)
    apply(x, residual, torch.tensor([1000.0, 1000.0], device=device, dtype=torch.bfloat16), 0.0, 0.0, False)
    assert residual.tolist() == [[1.0, 1.0]]
    assert x[0, 0] >= x[0, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashInfer's kernel needs a GPU")
@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
def test_rounds_as_flashinfer(weight_offset, device):
    """Squares are summed in another order, which changes the rounding of one number in ten thousand."""
    import flashinfer

    x, residual = torch.randn(2, 128, 4096, device=device).bfloat16()
    weight = torch.randn(4096, device=device).bfloat16()
    want = x.clone(), residual.clone()
    norm = flashinfer.gemma_fused_add_rmsnorm if weight_offset else flashinfer.fused_add_rmsnorm
    norm(*want, weight, 1e-6)
    add_rms_norm(x, residual, weight, 1e-6, weight_offset, False)
    assert torch.equal(residual, want[1])
    assert (x != want[0]).float().mean() < 1e-3
    torch.testing.assert_close(x, want[0], rtol=2**-7, atol=0.0)
