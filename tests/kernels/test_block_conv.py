import pytest
import torch

from sglang_dflash.ops.kernels.block_conv import block_conv
from sglang_dflash.ops.reference.block_conv import block_conv as reference

BOTH = pytest.mark.parametrize("convolve", [block_conv, reference], ids=["kernel", "reference"])


def arguments(blocks: int, rows: int, taps: int, hidden: int, group: int, dtype: torch.dtype, device: str):
    """Return x, which is a part of a wider tensor, delta and base."""
    tokens = blocks * rows
    x = torch.randn(tokens, hidden + 7, device=device).to(dtype)[:, :hidden]
    delta = torch.randn(tokens, 2, taps, hidden // group, device=device).to(dtype)
    return x, delta, torch.randn(2, taps, hidden, device=device).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("blocks", "rows", "taps", "hidden", "group"),
    [
        (0, 8, 2, 32, 16),
        (3, 1, 2, 48, 16),
        (2, 7, 3, 40, 4),
        (3, 16, 2, 1040, 16),
        (1, 5, 1, 6, 1),
        (2, 4, 4, 520, 520),
    ],
)
@pytest.mark.parametrize("side", [0, 1])
def test_matches_reference(blocks, rows, taps, hidden, group, side, dtype, device):
    x, delta, base = arguments(blocks, rows, taps, hidden, group, dtype, device)
    got, want = block_conv(x, delta, base, side, rows), reference(x, delta, base, side, rows)
    assert got.dtype == dtype and got.shape == x.shape and got.is_contiguous()
    # The interpreter truncates to bfloat16 where a GPU rounds.
    bound = {"rtol": 2**-7, "atol": 2**-10} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(got, want, **bound)


@BOTH
def test_definition(convolve, device):
    """Every weight is that of the output's row, its side, its tap, and its group of channels."""
    rows, taps, hidden, group = 5, 3, 12, 4
    x, delta, base = arguments(2, rows, taps, hidden, group, torch.float32, device)
    for side in (0, 1):
        got = convolve(x, delta, base, side, rows)
        for token in range(len(x)):
            for channel in range(hidden):
                want = sum(
                    (base[side, tap, channel] + delta[token, side, tap, channel // group]) * x[token - tap, channel]
                    for tap in range(min(taps, token % rows + 1))
                )
                assert abs(got[token, channel] - want) < 1e-5


@BOTH
def test_blocks_do_not_see_each_other(convolve, device):
    x, delta, base = arguments(3, 4, 3, 32, 8, torch.float32, device)
    got = convolve(x, delta, base, 0, 4)
    x[4:8], delta[4:8] = torch.nan, torch.nan
    changed = convolve(x, delta, base, 0, 4)
    assert torch.equal(changed[:4], got[:4]) and torch.equal(changed[8:], got[8:]) and changed[4:8].isnan().all()


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_identity(convolve, dtype, device):
    """The weights from which training starts change no bit."""
    x, delta, base = arguments(2, 8, 2, 64, 16, dtype, device)
    base.zero_()[:, 0] = 1
    assert torch.equal(convolve(x, delta.zero_(), base, 1, 8), x)
