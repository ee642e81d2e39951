import pytest
import torch

from sglang_dflash.ops.kernels.commit_state import commit_state
from sglang_dflash.ops.reference.commit_state import commit_state as reference
from sglang_dflash.types import BlockInputs, States, StateSlots

BLOCK, LAYERS, INTERVAL = 6, 2, 12
# Key heads, value heads, their sizes, channels and places of a convolution.
SHAPES = [(2, 4, 32, 32, 48, 3), (1, 3, 20, 17, 700, 2), (1, 1, 128, 128, 5, 3)]


def arguments(bs, shape, dtype, num_kept, device):
    heads, value_heads, key_size, value_size, channels, places = shape
    rows, num_slots = bs + 2, 4 * bs + 5
    block = (LAYERS, rows, BLOCK)
    # The states of a convolution after one token and the next share all inputs but one.
    memory = torch.randn(LAYERS, rows, BLOCK + places - 1, channels, device=device).to(dtype)
    inputs = BlockInputs(
        conv=memory.unfold(2, places, 1),
        key=torch.randn(*block, heads, key_size, device=device).to(dtype),
        change=torch.randn(*block, value_heads, value_size, device=device),
        log_decay=-torch.rand(*block, value_heads, device=device),
    )
    taken = 1 + torch.randperm(num_slots - 1, device=device)
    req_pool_indices = torch.randperm(bs + 3, device=device)[:bs]
    current = torch.zeros(bs + 3, dtype=torch.int32, device=device)
    current[req_pool_indices] = taken[:bs].int()
    # One is padding, and is as good as in slot 0; another keeps nothing.
    current[req_pool_indices[1:2]] = 0
    kept = None
    if num_kept:
        kept = torch.zeros(bs + 3, num_kept, dtype=torch.int64, device=device)
        kept[req_pool_indices] = taken[bs : bs + num_kept * bs].view(bs, num_kept)
        kept[req_pool_indices[2:3]] = 0
    turn = torch.randint(0, 2, (bs + 3,), dtype=torch.int32, device=device)
    # Where blocks begin, from behind a multiple of the interval to right before one.
    seq_lens = 3 * INTERVAL + torch.arange(bs, device=device) * 5 % INTERVAL
    # Not beside each other in memory.
    accept_lens = 1 + torch.arange(bs, device=device) % BLOCK

    def states():
        torch.manual_seed(1)
        return States(
            torch.randn(LAYERS, num_slots, channels, places, device=device).to(dtype),
            torch.randn(LAYERS, num_slots, value_heads, value_size, key_size, device=device),
        )

    return states, (inputs, StateSlots(current, kept, turn), req_pool_indices, seq_lens, accept_lens, INTERVAL)


@pytest.mark.parametrize("num_kept", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bs", [0, 1, 13])
def test_matches_reference(bs, shape, dtype, num_kept, device):
    states, plan = arguments(bs, shape, dtype, num_kept, device)
    got, want, before = states(), states(), states()
    is_due = torch.ones(1, dtype=torch.int64, device=device)

    commit_state(got, *plan, is_due)
    reference(want, *plan, is_due)

    torch.testing.assert_close(got.temporal, want.temporal, rtol=2e-5, atol=2e-5)
    assert torch.equal(got.conv, want.conv)
    written = (want.conv != before.conv).flatten(2).any(2).any(0).sum()
    assert (written > bs) == (num_kept > 0 and bs > 1)


def test_what_is_not_due(device):
    states, plan = arguments(13, SHAPES[0], torch.float32, 2, device)
    got, before = states(), states()
    commit_state(got, *plan, torch.zeros(1, dtype=torch.int64, device=device))
    assert torch.equal(got.temporal, before.temporal) and torch.equal(got.conv, before.conv)
