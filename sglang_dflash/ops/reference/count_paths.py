"""Statistics of accepted paths of draft trees, in torch."""

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
    """Count accepted nodes by their index in the tree, and accepted drafts by their candidate rank.

    A request counts if it has a tree and is not padding of a CUDA graph (request slot 0).

    Args:
        counts: [N + K] int64, added to. First, for each node, the requests that accepted it. Then, for each rank, the
            accepted drafts that were the candidate of that rank.
        paths: [bs, max_len] int64. Accepted nodes, the root first; see
            :func:`sglang_dflash.ops.reference.accept_paths`.
        accept_lens: [bs] int64. Length of each path.
        tokens: [bs, N] int64. Tokens of the nodes.
        candidates: [bs, max_len - 1, K] int64. Different tokens for each position after the root; None without drafts.
        is_chain: [bs] int64. 1 for requests that verify a chain instead of a tree.
        req_pool_indices: [bs] int64. Request slots.
    """
    num_nodes = tokens.shape[1]
    has_tree = (is_chain == 0) & (req_pool_indices != 0)
    is_counted = (torch.arange(paths.shape[1], device=paths.device) < accept_lens[:, None]) & has_tree[:, None]
    counts[:num_nodes].index_add_(0, paths.reshape(-1), is_counted.reshape(-1).to(counts.dtype))
    if candidates is not None:
        is_candidate = candidates == tokens.gather(1, paths)[:, 1:, None]
        counts[num_nodes:] += (is_candidate & is_counted[:, 1:, None]).sum(dim=(0, 1))
