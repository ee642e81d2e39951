"""The trees of the cycle equal the oracle's, which are the most probable prefixes of a block."""

import math
from itertools import product

import pytest
import torch
from support.oracle.tree import Drafts, Text, Tree, accept_path, grow_tree, margin

from sglang_dflash import ops
from sglang_dflash.ops.bigrams import tables_of
from sglang_dflash.types import DrawParameters, Trees

VOCAB = 40
DEPTHS = 4
# About one of five pairs of tokens is in it.
TEXT = torch.randint(VOCAB, (400,), generator=torch.Generator().manual_seed(0)).tolist()
# Its last five tokens occur before.
REPEATING = TEXT + TEXT[21:26]


def rows(num_requests: int, seed: int = 0) -> torch.Tensor:
    """Return log probabilities [requests, DEPTHS, VOCAB], with certain and uncertain positions."""
    generator = torch.Generator().manual_seed(seed)
    sharpness = 6 * torch.rand(num_requests, DEPTHS, 1, generator=generator)
    return (sharpness * torch.randn(num_requests, DEPTHS, VOCAB, generator=generator)).log_softmax(dim=-1)


def drafts_of(log_probs: torch.Tensor, num_candidates: int, text: list[int] | None = None) -> Drafts:
    return Drafts(log_probs, torch.arange(VOCAB), num_candidates, Text(TEXT if text is None else text))


def paths_of(tree: Tree) -> set[tuple[int, ...]]:
    """Return the tokens of every path from the root."""
    paths = [()]
    for node in range(1, len(tree.parents)):
        paths.append((*paths[tree.parents[node]], int(tree.tokens[node - 1])))
    return set(paths)


@pytest.mark.parametrize("tokens", [TEXT, REPEATING], ids=["without a copy", "with a copy"])
@pytest.mark.parametrize(("num_nodes", "k"), [(4, 2), (16, 8), (33, 3), (64, 5)])
def test_the_oracles_are_the_most_probable(num_nodes, k, tokens):
    log_probs = rows(1)[0]
    copy = [] if tokens is TEXT else TEXT[26 : 26 + DEPTHS]
    candidates, probs = log_probs.topk(k, dim=-1).indices.tolist(), log_probs.exp().tolist()
    for depth, token in enumerate(copy):
        if token not in candidates[depth]:
            candidates[depth][-1], probs[depth][token] = token, 0.0
    text, every = Text(tokens), {()}
    for depth in range(1, DEPTHS + 1):
        every |= set(product(*candidates[:depth]))

    def probability(path: tuple[int, ...]) -> float:
        """Return a path's probability. Tokens that the text has after the one before have weight e^2.

        The tokens of a copy share M / (M + 4) after M that match, and all candidates the rest.
        """
        result = 1.0
        for i, token in enumerate(path):
            weights = [math.exp(2 * text.has(path[i - 1], other)) if i else 1.0 for other in candidates[i]]
            of_candidates = [weight * probs[i][other] for weight, other in zip(weights, candidates[i])]
            total = sum(of_candidates) + 1 - sum(probs[i][other] for other in candidates[i])
            of_token = of_candidates[candidates[i].index(token)] / total
            if copy and (i == 0 or path[i - 1] == copy[i - 1]):
                copied = (5 + i) / (5 + i + 4)
                of_token = (1 - copied) * of_token + copied * (token == copy[i])
            result *= of_token
        return result

    by_probability = sorted(every, key=lambda path: -probability(path))
    tree = grow_tree(drafts_of(log_probs, k, tokens), num_nodes)
    assert paths_of(tree) == set(by_probability[:num_nodes])
    assert paths_of(tree) != paths_of(grow_tree(drafts_of(log_probs, k, text=[]), num_nodes)) or num_nodes == 4


@pytest.mark.parametrize(("num_nodes", "k"), [(4, 2), (16, 8), (33, 3), (64, 5), (64, 16)])
def test_the_cycles_are_the_oracles(num_nodes, k):
    log_probs = rows(num_requests := 6)
    best = log_probs.topk(k, dim=-1)
    bonus, seq_lens = torch.arange(num_requests) + VOCAB, 10 + torch.arange(num_requests)
    # Each request has its own text. Most of them end with a part that they have twice.
    texts = [TEXT[: 50 * i] + TEXT[7 : 7 + i] for i in range(num_requests)]
    lens = torch.tensor([len(text) for text in texts])
    rings = torch.tensor([text + [-1] * (512 - len(text)) for text in texts], dtype=torch.int32)
    tables = tables_of(rings, lens)
    trees = Trees.empty(num_requests, num_nodes, "cpu")
    req_to_token = torch.arange(num_requests * 90, dtype=torch.int32).view(num_requests, 90)
    is_chain = torch.zeros(num_requests, dtype=torch.int64)
    # Any number may be subtracted from all logits of a position.
    logits, log_sums = best.values + 3, torch.full(best.values.shape[:2], 3.0)
    slots, greedy = torch.arange(num_requests), DrawParameters.greedy(num_requests, "cpu")
    copies = ops.place_copies(rings, slots, lens - 1, is_chain, best.indices, logits)
    assert (copies[1] > 0).tolist() == [False, False, False, True, True, True]
    drafts = (best.indices, logits, log_sums, greedy, torch.zeros_like(slots), tables, is_chain, seq_lens, slots)
    table = ops.fill_table(*drafts, *copies)
    ops.grow_trees(bonus, best.indices, *table, is_chain, seq_lens, slots, req_to_token, trees)

    for i in range(num_requests):
        tree = grow_tree(drafts_of(log_probs[i], k, texts[i]), num_nodes)
        assert trees.tokens.view(num_requests, -1)[i].tolist() == [int(bonus[i]), *tree.tokens.tolist()]
        assert trees.parents[i].tolist() == [-1, *tree.parents[1:]]
        assert (trees.positions.view(num_requests, -1)[i] - seq_lens[i]).tolist() == tree.depths
        sees = trees.ancestors[i][:, None] >> torch.arange(num_nodes) & 1
        assert torch.equal(sees.bool(), tree.sees())


def accepted_length(log_probs: torch.Tensor, wanted: list[int], text: list[int]) -> int:
    """Return the number of accepted nodes, for a target whose token after a node is `wanted` at the node's depth."""
    tree = grow_tree(drafts_of(log_probs, 3, text), 12)
    return len(accept_path(tree, torch.tensor([wanted[depth] for depth in tree.depths])))


@pytest.mark.parametrize(("text", "least"), [(TEXT, 30), (REPEATING, 20)], ids=["without a copy", "with a copy"])
def test_margins_say_how_far_another_length_is(text, least):
    """No smaller change of the drafter's numbers changes what is accepted, and some larger change does.

    They count for less where the text says more.
    """
    changed = 0
    generator = torch.Generator().manual_seed(1)
    for log_probs in rows(40, seed=1):
        wanted = [*log_probs.exp().multinomial(1, generator=generator)[:, 0].tolist(), 0]
        if text is REPEATING and torch.rand((), generator=generator) < 0.5:
            wanted[:3] = TEXT[26:29]
        drafts = drafts_of(log_probs, 3, text)
        tree = grow_tree(drafts, 12)
        target_tokens = torch.tensor([wanted[depth] for depth in tree.depths])
        path = accept_path(tree, target_tokens)
        distance = margin(tree, path, target_tokens, drafts)
        # Two sums of as many numbers as the path has are compared, and each number may be off.
        noise = 0.49 * distance / DEPTHS * (2 * torch.rand(log_probs.shape, generator=generator) - 1)
        assert accepted_length(log_probs + noise, wanted, text) == len(path)
        own = torch.zeros_like(log_probs)
        for depth in range(min(len(path), DEPTHS)):
            own[depth, wanted[depth]] = 1.01 * distance
        changed += any(accepted_length(log_probs + sign * own, wanted, text) != len(path) for sign in (1, -1))
    assert changed >= least
