"""Trees of drafts, from tables of conditionals as `fill_table` makes them."""

import itertools

import pytest
import torch
from support.drafts import VOCAB, drafts_for, parameters_for

from sglang_dflash.ops.bigrams import TABLE_SIZE, tables_of
from sglang_dflash.ops.kernels.grow_trees import grow_trees
from sglang_dflash.ops.reference.fill_table import fill_table
from sglang_dflash.ops.reference.grow_trees import grow_trees as reference
from sglang_dflash.types import DrawParameters, Trees


def arguments_for(drafts):
    """Return the arguments of `grow_trees` but the trees; drafts: those of `fill_table`."""
    candidates, _, _, _, _, tables, is_chain, seq_lens, slots = drafts
    bs, device = len(candidates), candidates.device
    # A column of the blocks.
    bonus_tokens = torch.randint(0, VOCAB, (bs, 3), device=device)[:, 0]
    req_to_token = torch.randint(0, 2**31 - 1, (len(tables), 120), dtype=torch.int32, device=device)
    return (bonus_tokens, candidates, *fill_table(*drafts), is_chain, seq_lens, slots, req_to_token)


def greedy(drafts):
    """Return the same drafts, of greedy requests."""
    bs, device = len(drafts[0]), drafts[0].device
    return (*drafts[:3], parameters_for(bs, device, temperatures=[0]), *drafts[4:])


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
    assert_same(arguments_for(drafts_for(requests, depths, k, device)), num_nodes)


@pytest.mark.parametrize("num_nodes", [16, 40])
def test_equally_probable_paths(num_nodes, device):
    """And some that are no less probable than their prefixes, or impossible."""
    drafts = list(greedy(drafts_for(4, 7, 4, device, share=0)))
    drafts[1] = torch.randint(-2, 1, (4, 7, 4), device=device).float().sort(dim=-1, descending=True).values
    drafts[2] = torch.zeros(4, 7, device=device)
    drafts[1][2, :, 1:] = float("-inf")
    args = arguments_for(drafts)
    assert_same(args, num_nodes)
    # Of the third request only a chain is possible.
    assert (grown(grow_trees, args, num_nodes).parents[2] >= 0).sum() == 7


@pytest.mark.parametrize("grow", [grow_trees, reference])
def test_by_hand(grow, device):
    def tensor(values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype, device=device)

    candidates = tensor([[[11, 12], [21, 22]]] * 2)
    logits = tensor([[[0.6, 0.4], [0.9, 0.1]]] * 2, torch.float32).log() + 3
    log_sums = torch.full((2, 2), 3.0, device=device)
    table = torch.arange(40, dtype=torch.int32, device=device).view(2, 20)
    bigrams = torch.zeros(2, TABLE_SIZE, dtype=torch.int16, device=device)
    is_chain, seq_lens, rows, zeros = tensor([0, 1]), tensor([5, 10]), tensor([1, 0]), tensor([0, 0])
    parameters = DrawParameters.greedy(2, device)
    drafts = (candidates, logits, log_sums, parameters, zeros, bigrams, is_chain, seq_lens, rows)
    trees = grown(grow, (tensor([7, 8]), candidates, *fill_table(*drafts), is_chain, seq_lens, rows, table), 5)
    # Paths 11 (0.6), 11 21 (0.54), 12 (0.4), 12 21 (0.36); and a chain.
    assert trees.tokens.tolist() == [7, 11, 21, 12, 21, 8, 11, 21, 8, 8]
    assert trees.parents.tolist() == [[-1, 0, 1, 0, 3], [-1, 0, 1, -1, -1]]
    assert trees.positions.tolist() == [5, 6, 7, 6, 7, 10, 11, 12, 10, 10]
    assert trees.out_cache_loc.tolist() == [*range(25, 30), *range(10, 15)]
    assert trees.ancestors.tolist() == [[1, 0b11, 0b111, 0b1001, 0b11001], [1, 0b11, 0b111, 0b1000, 0b10000]]


@pytest.mark.parametrize("grow", [grow_trees, reference])
def test_by_hand_with_a_text(grow, device):
    """It has 12 before 22; of the first request, whose bonus token it has before 12, which counts for nothing."""

    def tensor(values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype, device=device)

    candidates = tensor([[[11, 12], [21, 22]]] * 2)
    log_probs = tensor([[[0.6, 0.4], [0.7, 0.3]]] * 2, torch.float32).log()
    zeros, slots = tensor([0, 0]), torch.arange(40, dtype=torch.int32, device=device).view(2, 20)
    bigrams = tables_of(tensor([[12, 22, 0, 0], [12, 22, 7, 12]]), tensor([2, 4]))
    parameters, rows = DrawParameters.greedy(2, device), tensor([1, 0])
    drafts = (candidates, log_probs, torch.zeros(2, 2, device=device), parameters, zeros, bigrams, zeros, zeros, rows)
    trees = grown(grow, (tensor([7, 8]), candidates, *fill_table(*drafts), zeros, zeros, rows, slots), 7)
    # After 12, 22 has 0.3 e^2 / (1 + 0.3 (e^2 - 1)) = 0.76: the paths have 0.6, 0.42, 0.4, 0.304, 0.18 and 0.096.
    assert trees.tokens.tolist() == [7, 11, 21, 12, 22, 22, 21, 8, 11, 21, 12, 22, 22, 21]
    assert trees.parents.tolist() == [[-1, 0, 1, 0, 3, 1, 3]] * 2


@pytest.mark.parametrize("grow", [grow_trees, reference])
@pytest.mark.parametrize(("num_nodes", "depths", "k"), [(12, 3, 3), (30, 4, 2), (30, 4, 3)])
def test_most_probable_paths(num_nodes, depths, k, grow, device):
    """The nodes are the most probable of all paths, in that order, for greedy and for sampled requests."""
    drafts = drafts_for(3, depths, k, device)
    drafts = (*drafts[:6], torch.zeros_like(drafts[6]), *drafts[7:])
    args = arguments_for(drafts)
    log_probs, ranks = args[2].double(), args[3].long()

    def of_path(request, path):
        total, before = 0.0, 0
        for depth, rank in enumerate(path):
            place = (ranks[request, depth, before] == rank).nonzero()[0, 0]
            total, before = total + log_probs[request, depth, before, place].item(), rank
        return total

    trees = grown(grow, args, num_nodes)
    tokens = trees.tokens.view(3, num_nodes).tolist()
    for request in range(3):
        every = [path for length in range(1, depths + 1) for path in itertools.product(range(k), repeat=length)]
        every.sort(key=lambda path: -of_path(request, path))
        want = [
            tuple(args[1][request, i, rank].item() for i, rank in enumerate(path)) for path in every[: num_nodes - 1]
        ]
        paths = [()]
        for token, parent in zip(tokens[request][1:], trees.parents[request, 1:].tolist()):
            # Taken before: it is an earlier node.
            paths.append((*paths[parent], token))
        assert paths[1:] == want


@pytest.mark.parametrize("num_nodes", [17, 64])
def test_is_a_tree(num_nodes, device):
    requests, depths, k = 2, 15, 8
    args = arguments_for(drafts_for(requests, depths, k, device))
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
            assert tokens[request, node] in args[1][request, positions[request, parent] - args[5][request]]
        assert len(set(zip(parents, tokens[request].tolist()))) == num_nodes


def test_impossible_candidates_are_no_nodes(device):
    """A broken model's rows, which the table has as -inf, end the paths before them."""
    drafts = list(greedy(drafts_for(3, 7, 4, device)))
    drafts[6].zero_()
    drafts[1][0, 2], drafts[2][1] = float("nan"), float("nan")
    args = arguments_for(drafts)
    assert_same(args, 16)
    depths = grown(grow_trees, args, 16).positions.view(3, 16) - args[5][:, None]
    assert depths.amax(dim=1).tolist()[:2] == [2, 0]
