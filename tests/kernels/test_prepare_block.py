import pytest
import torch

from sglang_dflash.kernels.prepare_block import prepare_block
from sglang_dflash.reference.prepare_block import prepare_block as reference


@pytest.mark.parametrize("bs", [0, 1, 3, 33])
@pytest.mark.parametrize("block_size", [2, 8, 10, 16])
def test_matches_reference(bs, block_size, device):
    width = 97
    req_to_token = torch.randint(0, 10**6, (bs + 2, width), dtype=torch.int32, device=device)
    # A view with a row stride of its own, as a slice of a larger pool would be.
    req_to_token = torch.cat([req_to_token, req_to_token], dim=1)[:, :width]
    args = (
        torch.randint(0, 150000, (bs,), device=device),
        torch.randint(0, width - block_size + 1, (bs,), device=device),
        torch.randperm(bs + 2, device=device)[:bs],
        req_to_token,
        151669,
        block_size,
    )
    for got, want in zip(prepare_block(*args), reference(*args), strict=True):
        assert got.dtype == want.dtype and got.is_contiguous()
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_last_positions_of_a_row_stay_in_the_row(device):
    req_to_token = torch.arange(3 * 20, dtype=torch.int32, device=device).view(3, 20)
    bonus = torch.tensor([7], device=device)
    _, positions, slots = prepare_block(
        bonus, torch.tensor([12], device=device), torch.tensor([1], device=device), req_to_token, 5, 8
    )
    assert positions.tolist() == [list(range(12, 20))]
    assert slots.tolist() == [list(range(32, 40))]
