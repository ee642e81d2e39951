import itertools
import math

import pytest
import torch

from sglang_dflash.ops.bigrams import LOG_WEIGHT, TABLE_SIZE, locate, put, tables_of
from sglang_dflash.ops.kernels.grow_trees import grow_trees
from sglang_dflash.ops.reference.grow_trees import grow_trees as reference
from sglang_dflash.types import Trees

VOCAB = 1000


def tables_with(candidates, rows, share):
    """Return tables for requests in `rows` and three more, with this share of the possible pairs of candidates."""
    pairs = torch.broadcast_tensors(candidates[:, :-1, :, None], candidates[:, 1:, None, :])
    first, second = (tokens.flatten(1) for tokens in pairs)
    tables = torch.zeros(len(rows) + 3, TABLE_SIZE, dtype=torch.int16, device=rows.device)
    tables[rows] = put(tables[rows], first, second, torch.rand(first.shape, device=rows.device) < share)
    return tables


def arguments(requests, depths, k, device, is_chain=None, share=0.3):
    """Return all arguments except the trees. The first requests have uncertain drafts, and so wide trees."""
    logits = torch.randn(requests, depths, k, device=device).sort(dim=-1, descending=True).values
    logits *= torch.linspace(1, 9, requests, device=device)[:, None, None]
    seq_lens = torch.randint(0, 50, (requests,), device=device)
    candidates = torch.rand(requests, depths, VOCAB, device=device).argsort(dim=-1)[:, :, :k].contiguous()
    rows = torch.randperm(requests + 3, device=device)[:requests]
    return (
        # A column of a larger tensor, as the bonus tokens of blocks are.
        torch.randint(0, VOCAB, (requests, 3), device=device)[:, 0],
        candidates,
        logits,
        logits.logsumexp(dim=-1) + torch.rand(requests, depths, device=device),
        tables_with(candidates, rows, share),
        torch.zeros_like(seq_lens) if is_chain is None else is_chain,
        seq_lens,
        rows,
        torch.randint(0, 2**31 - 1, (requests + 3, 120), dtype=torch.int32, device=device),
    )


def grown(grow, args, num_nodes) -> Trees:
    device = args[0].device
    trees = Trees.empty(len(args[0]), num_nodes, device)
    for tensor in vars(trees).values():
        tensor.fill_(-7)
    grow(*args, trees)
    return trees


def assert_same(args, num_nodes):
    got, want = grown(grow_trees, args, num_nodes), grown(reference, args, num_nodes)
    for name, tensor in vars(want).items():
        assert torch.equal(getattr(got, name), tensor), name


@pytest.mark.parametrize(
    ("requests", "num_nodes", "depths", "k"),
    [
        (0, 16, 15, 8),
        (1, 1, 15, 8),
        (2, 4, 0, 8),
        (5, 2, 1, 1),
        (33, 4, 3, 3),
        (5, 16, 15, 8),
        (5, 17, 7, 5),
        (2, 32, 15, 8),
        (2, 33, 15, 8),
        (2, 64, 63, 16),
        # More nodes than there are paths.
        (2, 16, 2, 3),
        (1, 64, 40, 1),
    ],
)
def test_matches_reference(requests, num_nodes, depths, k, device):
    is_chain = torch.arange(requests, device=device) % 3 // 2
    assert_same(arguments(requests, depths, k, device, is_chain), num_nodes)


@pytest.mark.parametrize("num_nodes", [16, 40])
def test_equally_probable_paths(num_nodes, device):
    """Some paths are as probable as their prefixes, others are impossible."""
    args = list(arguments(4, 7, 4, device, share=0))
    args[2] = torch.randint(-2, 1, (4, 7, 4), device=device).float().sort(dim=-1, descending=True).values
    args[3] = torch.zeros(4, 7, device=device)
    args[2][3, :, 1:] = float("-inf")
    assert_same(args, num_nodes)


@pytest.mark.parametrize("grow", [grow_trees, reference])
def test_by_hand(grow, device):
    def tensor(values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype, device=device)

    candidates = tensor([[[11, 12], [21, 22]]] * 2)
    logits = tensor([[[0.6, 0.4], [0.9, 0.1]]] * 2, torch.float32).log() + 3
    log_sums = torch.full((2, 2), 3.0, device=device)
    table = torch.arange(40, dtype=torch.int32, device=device).view(2, 20)
    bigrams = torch.zeros(2, TABLE_SIZE, dtype=torch.int16, device=device)
    is_chain, seq_lens, rows = tensor([0, 1]), tensor([5, 10]), tensor([1, 0])
    args = (tensor([7, 8]), candidates, logits, log_sums, bigrams, is_chain, seq_lens, rows, table)
    trees = grown(grow, args, 5)
    # Paths 11 (0.6), 11 21 (0.54), 12 (0.4), 12 21 (0.36); and a chain.
    assert trees.tokens.tolist() == [7, 11, 21, 12, 21, 8, 11, 21, 8, 8]
    assert trees.parents.tolist() == [[-1, 0, 1, 0, 3], [-1, 0, 1, -1, -1]]
    assert trees.positions.tolist() == [5, 6, 7, 6, 7, 10, 11, 12, 10, 10]
    assert trees.out_cache_loc.tolist() == [*range(25, 30), *range(10, 15)]
    assert trees.ancestors.tolist() == [[1, 0b11, 0b111, 0b1001, 0b11001], [1, 0b11, 0b111, 0b1000, 0b10000]]


@pytest.mark.parametrize("grow", [grow_trees, reference])
def test_by_hand_with_a_text(grow, device):
    """The texts have 12 before 22. The first one also has the bonus token before 12, which must not count."""

    def tensor(values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype, device=device)

    candidates = tensor([[[11, 12], [21, 22]]] * 2)
    log_probs = tensor([[[0.6, 0.4], [0.7, 0.3]]] * 2, torch.float32).log()
    zeros, slots = tensor([0, 0]), torch.arange(40, dtype=torch.int32, device=device).view(2, 20)
    bigrams = tables_of(tensor([[12, 22, 0, 0], [12, 22, 7, 12]]), tensor([2, 4]))
    args = (tensor([7, 8]), candidates, log_probs, torch.zeros(2, 2, device=device), bigrams, zeros, zeros)
    trees = grown(grow, (*args, tensor([1, 0]), slots), 7)
    # After 12, 22 has 0.3 e^2 / (1 + 0.3 (e^2 - 1)) = 0.76: the paths have 0.6, 0.42, 0.4, 0.304, 0.18 and 0.096.
    assert trees.tokens.tolist() == [7, 11, 21, 12, 22, 22, 21, 8, 11, 21, 12, 22, 22, 21]
    assert trees.parents.tolist() == [[-1, 0, 1, 0, 3, 1, 3]] * 2


@pytest.mark.parametrize("grow", [grow_trees, reference])
@pytest.mark.parametrize(("num_nodes", "depths", "k"), [(12, 3, 3), (30, 4, 2), (30, 4, 3)])
def test_most_probable_paths(num_nodes, depths, k, grow, device):
    """The nodes are the most probable of all paths."""
    args = arguments(3, depths, k, device)
    log_probs = args[2].double() - args[3].double()[:, :, None]
    places, tags = locate(args[1][:, :-1, :, None], args[1][:, 1:, None, :])
    weights = 1 + (math.exp(LOG_WEIGHT) - 1) * (args[4][args[7][:, None, None, None], places] == tags).double()
    assert (weights > 1).any() and (weights == 1).any()

    def probability(request, ranks):
        product = log_probs[request, 0, ranks[0]].exp().item()
        for i in range(1, len(ranks)):
            of_candidates = log_probs[request, i].exp() * weights[request, i - 1, ranks[i - 1]]
            total = 1 - log_probs[request, i].exp().sum() + of_candidates.sum()
            product *= (of_candidates[ranks[i]] / total).item()
        return product

    trees = grown(grow, args, num_nodes)
    tokens = trees.tokens.view(3, num_nodes).tolist()
    for request in range(3):
        every = [ranks for length in range(1, depths + 1) for ranks in itertools.product(range(k), repeat=length)]
        every.sort(key=lambda ranks: -probability(request, ranks))
        want = [
            tuple(args[1][request, i, rank].item() for i, rank in enumerate(ranks)) for ranks in every[: num_nodes - 1]
        ]
        paths = [()]
        for token, parent in zip(tokens[request][1:], trees.parents[request, 1:].tolist()):
            # The parent is an earlier node, so its path is known.
            paths.append((*paths[parent], token))
        assert paths[1:] == want


@pytest.mark.parametrize("num_nodes", [17, 64])
def test_is_a_tree(num_nodes, device):
    requests, depths, k = 2, 15, 8
    args = arguments(requests, depths, k, device)
    trees = grown(grow_trees, args, num_nodes)
    tokens, positions = trees.tokens.view(requests, -1), trees.positions.view(requests, -1)
    for request in range(requests):
        bits = [row & (1 << 64) - 1 for row in trees.ancestors[request].tolist()]
        parents = trees.parents[request].tolist()
        assert bits[0] == 1 and parents[0] == -1
        for node in range(1, num_nodes):
            parent = parents[node]
            assert 0 <= parent < node and bits[node] == bits[parent] | 1 << node
            assert positions[request, node] == positions[request, parent] + 1
            assert tokens[request, node] in args[1][request, positions[request, parent] - args[6][request]]
        assert len(set(zip(parents, tokens[request].tolist()))) == num_nodes


@pytest.mark.parametrize("bits", [0x7FC00000, -1])
@pytest.mark.parametrize("share", [0, 0.3])
def test_nan(bits, share, device):
    """Nodes form a tree and tokens are in the vocabulary, as in the reference, even if a broken model computes NaN."""
    nan = torch.tensor(bits, dtype=torch.int32, device=device).view(torch.float32)
    args = list(arguments(5, 7, 4, device, share=share))
    args[2][0, 2], args[3][1], args[3][2, 1] = nan, nan, nan
    # Rows of -inf, whose sums are -inf too, and of inf.
    args[2][3, 2], args[3][3, 2] = float("-inf"), float("-inf")
    args[2][4, 1], args[3][4, 1] = float("inf"), float("inf")
    assert_same(args, 16)
    trees = grown(grow_trees, args, 16)
    tokens, nodes = trees.tokens.view(5, 16), torch.arange(16, device=device)
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
    assert ((trees.parents >= -1) & (trees.parents < nodes)).all()
    depths = trees.positions.view(5, 16) - args[6][:, None]
    assert ((depths >= 0) & (depths <= 7)).all()
