import pytest
import torch

from sglang_dflash.ops.kernels.index_kv import index_kv
from sglang_dflash.ops.reference.index_kv import index_kv as reference


@pytest.mark.parametrize("has_slot_map", [False, True])
@pytest.mark.parametrize("window", [None, 1, 50, 10**6])
@pytest.mark.parametrize("bs", [1, 3, 9])
def test_matches_reference(bs, window, has_slot_map, device):
    block_size, width, num_slots = 10, 40_000, 1000
    req_to_token = torch.randint(0, num_slots, (bs + 2, 2 * width), dtype=torch.int32, device=device)[:, :width]
    # One request is longer than all its programs list in one step.
    seq_lens = torch.tensor([1, 34_000, 50, 49, 51, 1023, 1014, 1, 200], device=device)[-bs:]
    slot_map = torch.randperm(num_slots, device=device) if has_slot_map else None
    args = (req_to_token, torch.randperm(bs + 2, device=device)[:bs], seq_lens, window, block_size, slot_map)
    got, want = (
        (
            torch.full((bs + 1,), -1, dtype=torch.int32, device=device),
            torch.full((bs * width,), -1, dtype=torch.int32, device=device),
        )
        for _ in range(2)
    )
    index_kv(*args, *got)
    reference(*args, *want)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
