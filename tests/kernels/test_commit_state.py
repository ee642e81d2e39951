import pytest
import torch
from support.random_trees import chain_parents, paths_to_nodes, random_parents

from sglang_dflash.ops.kernels.commit_state import commit_state
from sglang_dflash.ops.reference.commit_state import commit_state as reference
from sglang_dflash.types import BlockInputs, States, StateSlots

MAX_LEN, LAYERS, INTERVAL = 6, 2, 12
# Key heads, value heads, their sizes, channels and places of a convolution.
SHAPES = [(2, 4, 32, 32, 48, 3), (1, 3, 20, 17, 700, 2), (1, 1, 128, 128, 5, 3)]


def random_paths(parents, lens):
    """Return paths of the trees, [bs, MAX_LEN], of given lengths or as long as there are; and their lengths."""
    paths, taken = torch.arange(MAX_LEN).repeat(len(parents), 1), []
    for i, row in enumerate(parents):
        to_nodes = [path for path in paths_to_nodes(row) if path[0] == 0 and len(path) <= int(lens[i])]
        length = max(map(len, to_nodes))
        longest = [path for path in to_nodes if len(path) == length]
        # The last of them is the least like a chain.
        paths[i, :length] = torch.tensor(longest[-1])
        taken.append(length)
    return paths, torch.tensor(taken, dtype=torch.int64)


def arguments(parents, shape, dtype, num_kept, device):
    heads, value_heads, key_size, value_size, channels, places = shape
    bs, num_nodes = parents.shape
    rows, num_slots = bs + 2, 4 * bs + 5
    # Where blocks begin: from right after a multiple of the interval to right before one.
    seq_lens = 3 * INTERVAL + torch.arange(bs, device=device) * 5 % INTERVAL
    paths, accept_lens = random_paths(parents, 1 + torch.arange(bs) % MAX_LEN)
    sizes = ((channels,), (heads, key_size), (value_heads, value_size), (value_heads,))
    conv, key, change, log_decay = (
        torch.full((LAYERS, rows, num_nodes + 1, *size), torch.nan, device=device) for size in sizes
    )
    # All rows off the accepted path stay NaN.
    for i in range(bs):
        nodes = paths[i, : accept_lens[i]].to(device)
        for x in (conv, key, change):
            x[:, i, nodes] = torch.randn_like(x[:, i, nodes])
        log_decay[:, i, nodes] = -torch.rand_like(log_decay[:, i, nodes])
    inputs = BlockInputs(conv.to(dtype), key.to(dtype), change, log_decay)
    taken = 1 + torch.randperm(num_slots - 1, device=device)
    req_pool_indices = torch.randperm(bs + 3, device=device)[:bs]
    current = torch.zeros(bs + 3, dtype=torch.int32, device=device)
    current[req_pool_indices] = taken[:bs].int()
    # One is padding, and has slot 0; another keeps nothing.
    current[req_pool_indices[1:2]] = 0
    kept = None
    if num_kept:
        kept = torch.zeros(bs + 3, num_kept, dtype=torch.int64, device=device)
        kept[req_pool_indices] = taken[bs : bs + num_kept * bs].view(bs, num_kept)
        kept[req_pool_indices[2:3]] = 0
    turn = torch.randint(0, 2, (bs + 3,), dtype=torch.int32, device=device)

    def states():
        torch.manual_seed(1)
        return States(
            torch.randn(LAYERS, num_slots, channels, places, device=device).to(dtype),
            torch.randn(LAYERS, num_slots, value_heads, value_size, key_size, device=device),
        )

    plan = (inputs, StateSlots(current, kept, turn), req_pool_indices, seq_lens, accept_lens.to(device), INTERVAL)
    return states, plan, paths.to(device)


@pytest.mark.parametrize("num_kept", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bs", [0, 1, 13])
def test_matches_reference(bs, shape, dtype, num_kept, device):
    parents = random_parents(bs, 17, MAX_LEN, reach=9)
    states, plan, paths = arguments(parents, shape, dtype, num_kept, device)
    got, want, before = states(), states(), states()
    is_due = torch.ones(1, dtype=torch.int64, device=device)

    commit_state(got, *plan, is_due, paths)
    reference(want, *plan, is_due, paths)

    torch.testing.assert_close(got.temporal, want.temporal, rtol=2e-5, atol=2e-5)
    assert torch.equal(got.conv, want.conv)
    assert not want.temporal.isnan().any() and not want.conv.isnan().any()
    written = (want.conv != before.conv).flatten(2).any(2).any(0).sum()
    assert (written > bs) == (num_kept > 0 and bs > 1)


def test_chains_share_one_path(device):
    states, plan, paths = arguments(chain_parents(13, MAX_LEN), SHAPES[0], torch.float32, 2, device)
    got, want = states(), states()
    is_due = torch.ones(1, dtype=torch.int64, device=device)

    commit_state(got, *plan, is_due, torch.arange(MAX_LEN, device=device).expand(13, -1))
    reference(want, *plan, is_due, paths)

    torch.testing.assert_close(got.temporal, want.temporal, rtol=2e-5, atol=2e-5)
    assert torch.equal(got.conv, want.conv)


def test_what_is_not_due(device):
    states, plan, paths = arguments(random_parents(13, 17, MAX_LEN), SHAPES[0], torch.float32, 2, device)
    got, before = states(), states()
    commit_state(got, *plan, torch.zeros(1, dtype=torch.int64, device=device), paths)
    assert torch.equal(got.temporal, before.temporal) and torch.equal(got.conv, before.conv)
