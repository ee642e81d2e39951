import pytest
import torch
from support.random_trees import random_parents

from sglang_dflash.ops.kernels.accept_paths import accept_paths
from sglang_dflash.ops.reference.accept_paths import accept_paths as reference


@pytest.mark.parametrize(
    ("bs", "num_nodes", "max_len"),
    [(0, 16, 16), (1, 1, 1), (5, 2, 16), (5, 4, 3), (33, 16, 6), (5, 17, 8), (5, 33, 40), (2, 64, 64)],
)
@pytest.mark.parametrize("vocab", [1, 2, 151936])
def test_matches_reference(bs, num_nodes, max_len, vocab, device):
    args = (
        torch.randint(0, vocab, (bs, num_nodes), device=device),
        random_parents(bs, num_nodes, max_len).to(device),
        torch.randint(0, vocab, (bs, num_nodes), device=device),
        torch.randint(0, 2**40, (bs,), device=device),
        max_len,
    )
    (got, got_paths), (want, want_paths) = accept_paths(*args), reference(*args)
    torch.testing.assert_close(got.packed, want.packed, rtol=0, atol=0)
    torch.testing.assert_close(got_paths, want_paths, rtol=0, atol=0)


@pytest.mark.parametrize("accept", [accept_paths, reference])
def test_by_hand(accept, device):
    """Node 0 is the parent of 1 (token 5) and 2 (6); node 2 is the parent of 3 (7) and 4 (8); node 5 is padding."""

    def tensor(rows):
        return torch.tensor(rows, device=device)

    tokens, parents = [9, 5, 6, 7, 8, 9], [-1, 0, 0, 2, 2, -1]
    targets = [[5, 1, 7, 3, 4, 0], [6, 1, 8, 3, 4, 0], [6, 1, 5, 3, 4, 0], [9, 1, 7, 3, 4, 9]]
    accepted, paths = accept(tensor([tokens] * 4), tensor([parents] * 4), tensor(targets), tensor([10, 20, 30, 40]), 4)
    assert accepted.accept_lens.tolist() == [2, 3, 2, 1]
    assert accepted.bonus_tokens.tolist() == [1, 4, 5, 9]
    assert accepted.new_seq_lens.tolist() == [12, 23, 32, 41]
    assert accepted.out_tokens.tolist() == [[5, 1, 0, 0], [6, 8, 4, 0], [6, 5, 0, 0], [9, 0, 0, 0]]
    assert paths.tolist() == [[0, 1, 2, 3], [0, 2, 4, 3], [0, 2, 2, 3], [0, 1, 2, 3]]
