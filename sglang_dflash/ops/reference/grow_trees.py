"""Trees of drafts from one drafter forward, in torch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from sglang_dflash.types import Trees


class _Node(NamedTuple):
    """What is before it, where it is, which candidate of its depth it is, and a bit for every node that it sees."""

    parent: int
    depth: int
    rank: int
    seen: int


class _Path(NamedTuple):
    """One that may be taken: how probable it is without its last token, and with it; that token's depth and rank, and
    the node before it."""

    base: np.float32
    log_prob: np.float32
    depth: int
    rank: int
    parent: int


def grow_trees(
    bonus_tokens: torch.Tensor,
    candidates: torch.Tensor,
    logits: torch.Tensor,
    log_sums: torch.Tensor,
    is_chain: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    trees: Trees,
) -> None:
    """Make trees of the most probable paths.

    A drafter's rows are independent of each other, so a path is as probable as the product of its tokens'
    probabilities, and any candidate of a depth may follow any of the depth before. The N - 1 most probable paths are
    found best first: each that is taken brings two that are no more probable than it, the one that ends in the next
    candidate of its depth instead, and the one that goes on with the first candidate of the next depth. A path is taken
    after all its beginnings. Source: DDTree (arXiv 2604.12989).

    Log probabilities are summed in float32 from the root on. Of equally probable paths the one is taken that goes on
    from the earliest node.

    Args:
        bonus_tokens: [P] int64; may be strided.
        candidates: [P, depths, K] int64, the tokens that may be at depth 1, 2, ..., the most probable first.
        logits: [P, depths, K] float32, theirs.
        log_sums: [P, depths] float32, what makes log probabilities of them when it is subtracted.
        is_chain: [P] int64, 1 for requests whose drafts are the first candidates in a row, one a depth.
        seq_lens: [P] int64, committed tokens that have KV; the root's position.
        req_pool_indices: [P] int64.
        req_to_token: [rows, width] int32.
        trees: written, of N nodes each.
    """
    num_requests, num_nodes = trees.parents.shape
    if num_requests == 0:
        return
    depths, k = candidates.shape[1:]
    # Of NumPy: single numbers that add in float32.
    log_probs = (logits - log_sums[:, :, None]).cpu().numpy()
    tokens, positions = trees.tokens.view(-1, num_nodes), trees.positions.view(-1, num_nodes)
    for request, is_alone in enumerate(is_chain.tolist()):
        nodes = [_Node(-1, 0, 0, 1)]
        paths = [_Path(np.float32(0), log_probs[request, 0, 0], 1, 0, 0)] if depths else []
        while paths and len(nodes) < num_nodes:
            # The first of equals.
            place = max(range(len(paths)), key=lambda i: paths[i].log_prob)
            taken, node = paths[place], len(nodes)
            nodes.append(_Node(taken.parent, taken.depth, taken.rank, nodes[taken.parent].seen | 1 << node))
            next_ones = []
            if taken.rank + 1 < k and not is_alone:
                log_prob = taken.base + log_probs[request, taken.depth - 1, taken.rank + 1]
                next_ones.append(taken._replace(log_prob=log_prob, rank=taken.rank + 1))
            paths[place : place + 1] = next_ones
            if taken.depth < depths:
                log_prob = taken.log_prob + log_probs[request, taken.depth, 0]
                paths.append(_Path(taken.log_prob, log_prob, taken.depth + 1, 0, node))
        num_drafts = len(nodes) - 1
        # The others are no nodes.
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


def _signed(node: _Node) -> _Node:
    """With its bits as those of an int64."""
    return node._replace(seen=node.seen - (1 << 64) if node.seen >> 63 else node.seen)
