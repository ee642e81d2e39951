import pytest
import torch

from sglang_dflash.ops.kernels.count_paths import count_paths
from sglang_dflash.ops.reference.count_paths import count_paths as reference


@pytest.mark.parametrize(
    ("bs", "num_nodes", "max_len", "num_candidates"),
    [(0, 16, 16, 8), (1, 1, 1, 1), (5, 4, 3, 2), (33, 16, 16, 8), (5, 17, 6, 3), (7, 64, 33, 64)],
)
@pytest.mark.parametrize("has_drafts", [True, False])
def test_matches_reference(bs, num_nodes, max_len, num_candidates, has_drafts, device):
    paths = torch.rand(bs, num_nodes, device=device).argsort(dim=-1)[:, :max_len]
    vocab = 3 * num_candidates
    args = (
        paths,
        torch.randint(1, max_len + 1, (bs,), device=device),
        # About one draft in three is a candidate. With simulated acceptance, none may be.
        torch.randint(0, vocab, (bs, num_nodes), device=device),
        torch.rand(bs, max_len - 1, vocab, device=device).argsort(dim=-1)[..., :num_candidates] if has_drafts else None,
        torch.randint(0, 2, (bs,), device=device),
        torch.randint(0, 3, (bs,), device=device),
    )
    before = torch.randint(0, 2**40, (num_nodes + num_candidates,), device=device)
    got, want = before.clone(), before.clone()
    count_paths(got, *args)
    reference(want, *args)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("count", [count_paths, reference])
def test_by_hand(count, device):
    """The third of four requests has a chain, and the fourth is padding."""

    def tensor(rows):
        return torch.tensor(rows, device=device)

    counts = tensor([100, 0, 0, 0, 0, 0])
    paths = tensor([[0, 2, 3], [0, 1, 2], [0, 1, 2], [0, 1, 2]])
    tokens = tensor([[9, 5, 6, 7]] * 4)
    candidates = tensor([[[5, 6], [7, 8]], [[5, 6], [6, 7]], [[5, 6], [6, 7]], [[5, 6], [6, 7]]])
    count(counts, paths, tensor([3, 2, 3, 3]), tokens, candidates, tensor([0, 0, 1, 0]), tensor([4, 1, 2, 0]))
    # The first request's drafts were of rank 1 and 0, the second's of rank 0.
    assert counts.tolist() == [102, 1, 1, 1, 2, 1]
