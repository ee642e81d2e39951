import pytest
import torch

from sglang_dflash.ops.kernels.follow_table import follow_table
from sglang_dflash.ops.reference.follow_table import follow_table as reference

BOTH = pytest.mark.parametrize("follow", [follow_table, reference], ids=["kernel", "reference"])
SIZES = [(0, 15, 8), (3, 0, 4), (1, 1, 2), (5, 7, 16), (4, 15, 5), (2, 63, 16), (33, 3, 1)]


def arguments(bs: int, depths: int, k: int, device: str):
    """Return random candidates, ranks and blocks. As in a table, the first position has one row k times."""
    candidates = torch.randint(0, 2**40, (bs, depths, k), device=device)
    ranks = torch.rand(bs, depths, k, k, device=device).argsort(dim=-1).to(torch.uint8)
    ranks[:, :1] = ranks[:, :1, :1]
    return candidates, ranks, torch.full((bs, depths + 3), -1, device=device)[:, : depths + 1]


@pytest.mark.parametrize(("bs", "depths", "k"), SIZES)
def test_matches_reference(bs, depths, k, device):
    candidates, ranks, block = arguments(bs, depths, k, device)
    want = block.clone()
    follow_table(candidates, ranks, block)
    reference(candidates, ranks, want)
    assert torch.equal(block, want)


@BOTH
@pytest.mark.parametrize(("bs", "depths", "k"), SIZES)
def test_walk(follow, bs, depths, k, device):
    candidates, ranks, block = arguments(bs, depths, k, device)
    whole = block.new_full((bs, depths + 3), -1)
    follow(candidates, ranks, whole[:, : depths + 1])
    for i in range(bs):
        chosen, path = 0, [-1]
        for depth in range(depths):
            chosen = int(ranks[i, depth, chosen, 0])
            path.append(int(candidates[i, depth, chosen]))
        # The bonus token and what is after the block are not written.
        assert whole[i].tolist() == [*path, -1, -1]
