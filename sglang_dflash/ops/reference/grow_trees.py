"""Trees of drafts from a table of conditional log probabilities, in torch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from sglang_dflash.types import Trees


class _Node(NamedTuple):
    """A node of a tree.

    Attributes:
        parent: the node before it, or -1.
        depth: drafts of its path.
        rank: which candidate of its position it is.
        seen: bit i is set if node i is on its path.
    """

    parent: int
    depth: int
    rank: int
    seen: int


def grow_trees(
    bonus_tokens: torch.Tensor,
    candidates: torch.Tensor,
    log_probs: torch.Tensor,
    ranks: torch.Tensor,
    is_chain: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    trees: Trees,
) -> None:
    """Make trees of the most probable paths.

    A path is as probable as the product of its conditionals. The N - 1 most probable paths are found best first: each
    path that is taken offers two more, the next candidate after the same parent, and the first candidate after itself.
    Neither is more probable than the one that offers it, as rows of the table descend. A path is taken after all its
    prefixes. Source: DDTree (arXiv 2604.12989), with conditionals in place of independent rows.

    Log probabilities are summed in float32 from the root on. Of equally probable paths the one is taken whose parent
    is the earliest node. A candidate of log probability -inf is never taken.

    Args:
        bonus_tokens: [bs] int64; may be strided.
        candidates: [bs, D, K] int64. Draft tokens of position d.
        log_probs: [bs, D, K, K] float32, and
        ranks: [bs, D, K, K] uint8: of :func:`sglang_dflash.ops.reference.fill_table.fill_table`.
        is_chain: [bs] int64. 1 for requests whose drafts are a chain, the first of each row of the table.
        seq_lens: [bs] int64. Position of the root.
        req_pool_indices: [bs] int64.
        req_to_token: [slots, width] int32.
        trees: written, N nodes for each request.
    """
    bs, num_nodes = trees.parents.shape
    if bs == 0:
        return
    depths, k = candidates.shape[1:]
    # NumPy's single numbers add in float32.
    table, order = log_probs.cpu().numpy(), ranks.tolist()
    tokens, positions = trees.tokens.view(-1, num_nodes), trees.positions.view(-1, num_nodes)
    for request, is_alone in enumerate(is_chain.tolist()):
        nodes, of_path, num_taken = [_Node(-1, 0, 0, 1)], [np.float32(0)], [0]

        def best_after(node: int, request=request, is_alone=is_alone, nodes=nodes, of_path=of_path, taken=num_taken):
            """Return the log probability of the best path after a node that is not taken yet; -inf: there is none."""
            _, depth, rank, _ = nodes[node]
            if depth == depths or taken[node] == (1 if is_alone else k):
                return np.float32(-np.inf)
            return of_path[node] + table[request, depth, rank, taken[node]]

        while len(nodes) < num_nodes:
            # The first of equals.
            parent = max(range(len(nodes)), key=best_after)
            log_prob = best_after(parent)
            if not log_prob > -np.inf:
                break
            _, depth, rank, seen = nodes[parent]
            child = order[request][depth][rank][num_taken[parent]]
            num_taken[parent] += 1
            nodes.append(_Node(parent, depth + 1, child, seen | 1 << len(nodes)))
            of_path.append(log_prob)
            num_taken.append(0)
        num_drafts = len(nodes) - 1
        # The others are padding.
        nodes += [_Node(-1, 0, 0, 1 << node) for node in range(len(nodes), num_nodes)]
        parents, of_depth, taken, seen = (torch.tensor(values) for values in zip(*map(_signed, nodes), strict=True))
        tokens[request] = bonus_tokens[request]
        drafts = slice(1, 1 + num_drafts)
        tokens[request, drafts] = candidates[request, of_depth[drafts] - 1, taken[drafts]]
        trees.parents[request] = parents
        trees.ancestors[request] = seen
        positions[request] = seq_lens[request] + of_depth.to(seq_lens.device)
    places = seq_lens[:, None] + torch.arange(num_nodes, device=seq_lens.device)
    trees.out_cache_loc.view(-1, num_nodes).copy_(req_to_token[req_pool_indices[:, None], places])


def _signed(node: _Node) -> _Node:
    """Return a node whose bits are those of an int64."""
    return node._replace(seen=node.seen - (1 << 64) if node.seen >> 63 else node.seen)
