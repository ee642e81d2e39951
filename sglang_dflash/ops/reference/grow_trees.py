"""Trees of drafts from one drafter forward, in torch."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from sglang_dflash.ops.bigrams import LOG_WEIGHT, locate
from sglang_dflash.types import Trees


class _Node(NamedTuple):
    """Node of a tree.

    Attributes:
        parent: index of the node before it; -1 for the root.
        depth: 0 for the root.
        rank: which candidate of its depth it is.
        seen: bits of the nodes that it sees.
    """

    parent: int
    depth: int
    rank: int
    seen: int


class _Path(NamedTuple):
    """Path that may be taken after a node: its log probability, and the candidate that it ends in."""

    log_prob: np.float32
    rank: int


def grow_trees(
    bonus_tokens: torch.Tensor,
    candidates: torch.Tensor,
    logits: torch.Tensor,
    log_sums: torch.Tensor,
    bigram_tables: torch.Tensor,
    is_chain: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    trees: Trees,
) -> None:
    """Grow trees of the N - 1 most probable paths.

    The drafter's distributions of a block are independent of each other. So any candidate of a depth may follow any
    candidate of the depth before, and the probability of a path is the product of its tokens' probabilities. After a
    draft token, candidates that follow it in the request's text count `exp(LOG_WEIGHT)` times as much, and the depth's
    probabilities are divided by their new sum. After the bonus token, which the drafter has seen, they do not.

    The paths are found best first. A path that is taken adds two that are not more probable: one that ends in the next
    candidate of its depth instead, and one that goes on with the best candidate of the next depth. So a path is taken
    after all its prefixes. Source: DDTree (arXiv 2604.12989), without the weights of the text.

    Log probabilities are summed in float32 from the root on. Of equally probable paths the one after the earliest node
    is taken, and of those the one with the most probable candidate. A log probability that is NaN or inf counts as
    -inf: a broken model drafts such tokens last.

    Args:
        bonus_tokens: [P] int64. May be strided.
        candidates: [P, depths, K] int64. Tokens that may be at depth 1, 2, ..., the most probable first.
        logits: [P, depths, K] float32. Of the candidates. Where one is NaN or inf, all of its depth are.
        log_sums: [P, depths] float32. Log-sum-exp of each depth over the vocabulary.
        bigram_tables: [rows, TABLE_SIZE] int16. Of each row of `req_to_token`, see :mod:`sglang_dflash.ops.bigrams`.
        is_chain: [P] int64. 1 for requests that get a chain of the first candidates.
        seq_lens: [P] int64. Committed tokens with KV: the root's position.
        req_pool_indices: [P] int64.
        req_to_token: [rows, width] int32.
        trees: written, N nodes for each request.
    """
    num_requests, num_nodes = trees.parents.shape
    if num_requests == 0:
        return
    depths = candidates.shape[1]
    log_probs = logits - log_sums[:, :, None]
    log_probs = torch.where(log_probs < math.inf, log_probs, -math.inf)
    places, tags = locate(candidates[:, :-1, :, None], candidates[:, 1:, None, :])
    is_seen = bigram_tables[req_pool_indices[:, None, None, None], places] == tags
    behind_drafts = log_probs[:, 1:, None, :]
    mass = (behind_drafts.exp() * is_seen).sum(dim=-1)
    # NumPy scalars add in float32.
    at_first = log_probs[:, :1].cpu().numpy()
    behind_drafts = (behind_drafts + LOG_WEIGHT * is_seen).cpu().numpy()
    shifts = (1 + math.expm1(LOG_WEIGHT) * mass).log().cpu().numpy()
    tokens, positions = trees.tokens.view(-1, num_nodes), trees.positions.view(-1, num_nodes)
    for request, is_alone in enumerate(is_chain.tolist()):
        nodes = [_Node(-1, 0, 0, 1)]
        # Paths after each node, the best first.
        waiting = [_paths(np.float32(0), row, is_alone) for row in at_first[request]]
        while len(nodes) < num_nodes and any(waiting):
            # Of equals, `max` returns the first.
            parent = max((node for node, paths in enumerate(waiting) if paths), key=lambda i: waiting[i][0].log_prob)
            taken, depth = waiting[parent].pop(0), nodes[parent].depth + 1
            nodes.append(_Node(parent, depth, taken.rank, nodes[parent].seen | 1 << len(nodes)))
            paths = []
            if depth < depths:
                place = request, depth - 1, taken.rank
                paths = _paths(taken.log_prob - shifts[place], behind_drafts[place], is_alone)
            waiting.append(paths)
        num_drafts = len(nodes) - 1
        # Padding.
        nodes += [_Node(-1, 0, 0, 1 << node) for node in range(len(nodes), num_nodes)]
        parents, of_depth, ranks, seen = (torch.tensor(values) for values in zip(*map(_signed, nodes), strict=True))
        tokens[request] = bonus_tokens[request]
        drafts = slice(1, 1 + num_drafts)
        tokens[request, drafts] = candidates[request, of_depth[drafts] - 1, ranks[drafts]]
        trees.parents[request] = parents
        trees.ancestors[request] = seen
        positions[request] = seq_lens[request] + of_depth.to(seq_lens.device)
    places = seq_lens[:, None] + torch.arange(num_nodes, device=seq_lens.device)
    trees.out_cache_loc.view(-1, num_nodes).copy_(req_to_token[req_pool_indices[:, None], places])


def _paths(base: np.float32, of_candidates: np.ndarray, is_alone: bool) -> list[_Path]:
    """Return the paths after a node, the best first.

    Args:
        base: log probability of the path to the node.
        of_candidates: [K] float32. Log probabilities of the candidates.
        is_alone: whether only the first candidate may follow.
    """
    paths = [_Path(base + log_prob, rank) for rank, log_prob in enumerate(of_candidates)]
    return sorted(paths[:1] if is_alone else paths, key=lambda path: -path.log_prob)


def _signed(node: _Node) -> _Node:
    """Return a node whose bits are those of an int64."""
    return node._replace(seen=node.seen - (1 << 64) if node.seen >> 63 else node.seen)
