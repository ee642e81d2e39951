"""The trees that a cycle grows are the oracle's, and those are the most probable beginnings of a block."""

from itertools import product

import pytest
import torch

from sglang_dflash import ops
from sglang_dflash.oracle.tree import Tree, accept_path, grow_tree, margin
from sglang_dflash.types import Trees

VOCAB = 40
DEPTHS = 4


def rows(num_requests: int, seed: int = 0) -> torch.Tensor:
    """[P, DEPTHS, VOCAB] log probabilities, of rows that are sure of a token and of rows that are not."""
    generator = torch.Generator().manual_seed(seed)
    sharpness = 6 * torch.rand(num_requests, DEPTHS, 1, generator=generator)
    return (sharpness * torch.randn(num_requests, DEPTHS, VOCAB, generator=generator)).log_softmax(dim=-1)


def of_oracle(log_probs: torch.Tensor, num_nodes: int, num_candidates: int) -> Tree:
    return grow_tree(log_probs, torch.arange(VOCAB), num_nodes, num_candidates)


def paths_of(tree: Tree) -> set[tuple[int, ...]]:
    """The tokens of every path from the root."""
    paths = [()]
    for node in range(1, len(tree.parents)):
        paths.append((*paths[tree.parents[node]], int(tree.tokens[node - 1])))
    return set(paths)


@pytest.mark.parametrize(("num_nodes", "k"), [(4, 2), (16, 8), (33, 3), (64, 5)])
def test_the_oracles_are_the_most_probable(num_nodes, k):
    log_probs = rows(1)[0]
    best = log_probs.topk(k, dim=-1)
    every = {()}
    for depth in range(1, DEPTHS + 1):
        every |= set(product(*best.indices[:depth].tolist()))
    by_probability = sorted(every, key=lambda path: -sum(float(log_probs[i, token]) for i, token in enumerate(path)))

    assert paths_of(of_oracle(log_probs, num_nodes, k)) == set(by_probability[:num_nodes])


@pytest.mark.parametrize(("num_nodes", "k"), [(4, 2), (16, 8), (33, 3), (64, 5), (64, 16)])
def test_the_cycles_are_the_oracles(num_nodes, k):
    log_probs = rows(num_requests := 6)
    best = log_probs.topk(k, dim=-1)
    bonus, seq_lens = torch.arange(num_requests) + VOCAB, 10 + torch.arange(num_requests)
    trees = Trees.empty(num_requests, num_nodes, "cpu")
    req_to_token = torch.arange(num_requests * 90, dtype=torch.int32).view(num_requests, 90)
    is_chain = torch.zeros(num_requests, dtype=torch.int64)
    # Any number may be taken from all logits of a row.
    logits, log_sums = best.values + 3, torch.full(best.values.shape[:2], 3.0)
    ops.grow_trees(
        bonus, best.indices, logits, log_sums, is_chain, seq_lens, torch.arange(num_requests), req_to_token, trees
    )

    for i in range(num_requests):
        tree = of_oracle(log_probs[i], num_nodes, k)
        assert trees.tokens.view(num_requests, -1)[i].tolist() == [int(bonus[i]), *tree.tokens.tolist()]
        assert trees.parents[i].tolist() == [-1, *tree.parents[1:]]
        assert (trees.positions.view(num_requests, -1)[i] - seq_lens[i]).tolist() == tree.depths
        sees = trees.ancestors[i][:, None] >> torch.arange(num_nodes) & 1
        assert torch.equal(sees.bool(), tree.sees())


def accepted_length(log_probs: torch.Tensor, wanted: list[int]) -> int:
    """Of a target whose token after every node is that of its depth."""
    tree = of_oracle(log_probs, 12, 3)
    return len(accept_path(tree, torch.tensor([wanted[depth] for depth in tree.depths])))


def test_margins_say_how_far_another_length_is():
    """Within it no change of the drafter's numbers changes what is accepted, and beyond it one does."""
    changed = 0
    generator = torch.Generator().manual_seed(1)
    for log_probs in rows(40, seed=1):
        wanted = [*log_probs.exp().multinomial(1, generator=generator)[:, 0].tolist(), 0]
        tree = of_oracle(log_probs, 12, 3)
        target_tokens = torch.tensor([wanted[depth] for depth in tree.depths])
        path = accept_path(tree, target_tokens)
        distance = margin(tree, path, target_tokens, log_probs, torch.arange(VOCAB), 3)
        # Two sums are compared, of as many numbers as a path has, each of which may be off.
        noise = 0.49 * distance / DEPTHS * (2 * torch.rand(log_probs.shape, generator=generator) - 1)
        assert accepted_length(log_probs + noise, wanted) == len(path)
        own = torch.zeros_like(log_probs)
        for depth in range(min(len(path), DEPTHS)):
            own[depth, wanted[depth]] = 1.01 * distance
        changed += any(accepted_length(log_probs + sign * own, wanted) != len(path) for sign in (1, -1))
    assert changed >= 30
