import pytest
import torch

from sglang_dflash.ops.kernels.move_kv import move_kv
from sglang_dflash.ops.reference.move_kv import move_kv as reference
from sglang_dflash.types import KVRows

SLOTS = 700


def random_rows(shapes, dtype, device) -> list[torch.Tensor]:
    return [torch.randint(0, 127, (SLOTS, *shape), device=device).to(dtype) for shape in shapes]


def random_paths(bs, num_nodes, max_len, device):
    """Return paths whose first half equals a chain's, and their lengths."""
    lens = torch.randint(1, max_len + 1, (bs,), device=device)
    paths = torch.zeros(bs, max_len, dtype=torch.int64, device=device)
    for request, length in enumerate(lens.tolist()):
        kept = length // 2
        others = kept + torch.randperm(num_nodes - kept, device=device)[: length - kept].sort().values
        paths[request, :length] = torch.cat((torch.arange(kept, device=device), others))
        # The root is always accepted.
        paths[request, 0] = 0
    return paths, lens


@pytest.mark.parametrize(("bs", "num_nodes", "max_len"), [(0, 16, 16), (1, 1, 1), (5, 16, 16), (3, 33, 9), (2, 64, 64)])
@pytest.mark.parametrize(
    ("shapes", "dtype"),
    [
        ([(2, 64), (2, 64), (3, 50)], torch.bfloat16),
        ([(1,), (7,), (3, 5)], torch.uint8),
        ([(1, 3), (2, 7)], torch.float16),
        ([(4, 300)], torch.float32),
        # One slot has more bytes than a program moves.
        ([(1, 576), (9, 128)], torch.bfloat16),
    ],
)
@pytest.mark.parametrize("is_mapped", [False, True])
def test_matches_reference(bs, num_nodes, max_len, shapes, dtype, is_mapped, device):
    got = random_rows(shapes, dtype, device)
    want = [buffer.clone() for buffer in got]
    slots = torch.randperm(SLOTS, device=device)[: bs * num_nodes].view(bs, num_nodes)
    paths, lens = random_paths(bs, num_nodes, max_len, device)
    slot_map = torch.randperm(SLOTS, device=device) if is_mapped else None
    move_kv(KVRows.of(got), slots, paths, lens, slot_map)
    reference(KVRows.of(want), slots, paths, lens, slot_map)
    for mine, theirs in zip(got, want):
        assert torch.equal(mine, theirs)


def test_buffers_that_begin_anywhere(device):
    """The buffer starts one byte after an address from which 16 bytes could be read at a time."""
    memory = torch.randint(0, 127, (SLOTS * 32 + 1,), device=device).to(torch.uint8)
    got = memory[1:].view(SLOTS, 32)
    want = got.clone()
    args = (torch.arange(20, device=device).view(1, -1), torch.tensor([[0, 3, 7]], device=device))
    lens = torch.tensor([3], device=device)
    move_kv(KVRows.of([got]), *args, lens, None)
    reference(KVRows.of([want]), *args, lens, None)
    assert torch.equal(got, want)


@pytest.mark.parametrize("move", [move_kv, reference])
def test_by_hand(move, device):
    """A node may be in the slot that a later one is moved to. Slots after the accepted path keep their values."""
    buffer = torch.arange(100, dtype=torch.int32, device=device).view(100, 1)
    slots = torch.tensor([[50, 51, 52, 53, 54], [9, 7, 5, 3, 1]], device=device)
    paths = torch.tensor([[0, 2, 3, 4], [0, 1, 4, 0]], device=device)
    move(KVRows.of([buffer]), slots, paths, torch.tensor([4, 3], device=device), None)
    changed = {50: 50, 51: 52, 52: 53, 53: 54, 54: 54, 5: 1}
    assert buffer[:, 0].tolist() == [changed.get(slot, slot) for slot in range(100)]
