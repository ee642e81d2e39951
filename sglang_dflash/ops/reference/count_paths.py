"""Counts of what accepted paths of drafted trees consist of, in torch."""

from __future__ import annotations

import torch


def count_paths(
    counts: torch.Tensor,
    paths: torch.Tensor,
    accept_lens: torch.Tensor,
    tokens: torch.Tensor,
    candidates: torch.Tensor | None,
    is_chain: torch.Tensor,
    req_pool_indices: torch.Tensor,
) -> None:
    """Count accepted nodes by their place in the tree, and accepted drafts by which candidate they were.

    A request counts if it has a tree and is none of a graph's padding, whose row of `req_to_token` is 0.

    Args:
        counts: [N + K] int64, added to: for each node the requests that accepted it; then for the first, the second
            and each other candidate of a position the accepted drafts that were it.
        paths: [bs, L] int64, accepted nodes, the root first; see :func:`sglang_dflash.ops.reference.accept_paths`.
        accept_lens: [bs] int64, of each path.
        tokens: [bs, N] int64, of the nodes.
        candidates: [bs, L - 1, K] int64, different tokens for each position behind the root; None: there are no drafts.
        is_chain: [bs] int64, 1 where a request has a chain in place of its tree.
        req_pool_indices: [bs] int64.
    """
    num_nodes = tokens.shape[1]
    has_tree = (is_chain == 0) & (req_pool_indices != 0)
    is_counted = (torch.arange(paths.shape[1], device=paths.device) < accept_lens[:, None]) & has_tree[:, None]
    counts[:num_nodes].index_add_(0, paths.reshape(-1), is_counted.reshape(-1).to(counts.dtype))
    if candidates is not None:
        is_candidate = candidates == tokens.gather(1, paths)[:, 1:, None]
        counts[num_nodes:] += (is_candidate & is_counted[:, 1:, None]).sum(dim=(0, 1))
