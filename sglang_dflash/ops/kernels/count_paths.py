"""Statistics of accepted paths of draft trees, in one launch with one warp per request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _count_paths_kernel(
    counts,
    paths,
    accept_lens,
    tokens,
    candidates,
    is_chain,
    req_pool_indices,
    num_nodes,
    max_len,
    num_candidates,
    INDICES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    HAS_CANDIDATES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    has_tree = (tl.load(is_chain + request) == 0) & (tl.load(req_pool_indices + request) != 0)
    index = tl.arange(0, INDICES)
    is_counted = (index < tl.load(accept_lens + request)) & has_tree
    node = tl.load(paths + request * max_len + index, mask=is_counted, other=0)
    tl.atomic_add(counts + node, tl.full((INDICES,), 1, tl.int64), mask=is_counted, sem="relaxed")
    if HAS_CANDIDATES:
        # Candidates start at the position after the root.
        is_draft = is_counted & (index > 0)
        draft = tl.load(tokens + request * num_nodes + node, mask=is_draft, other=-1)
        rank = tl.arange(0, CANDIDATES)[None, :]
        is_rank = is_draft[:, None] & (rank < num_candidates)
        position = request * (max_len - 1) + index - 1
        candidate = tl.load(candidates + position[:, None] * num_candidates + rank, mask=is_rank, other=-1)
        is_rank &= candidate == draft[:, None]
        ones = tl.full((INDICES, CANDIDATES), 1, tl.int64)
        tl.atomic_add(counts + num_nodes + rank + index[:, None] * 0, ones, mask=is_rank, sem="relaxed")


def count_paths(
    counts: torch.Tensor,
    paths: torch.Tensor,
    accept_lens: torch.Tensor,
    tokens: torch.Tensor,
    candidates: torch.Tensor | None,
    is_chain: torch.Tensor,
    req_pool_indices: torch.Tensor,
) -> None:
    """See :func:`sglang_dflash.ops.reference.count_paths.count_paths`."""
    bs, max_len = paths.shape
    if bs == 0:
        return
    num_nodes = tokens.shape[1]
    num_candidates = len(counts) - num_nodes
    _count_paths_kernel[(bs,)](
        counts,
        paths.contiguous(),
        accept_lens,
        tokens.contiguous(),
        None if candidates is None else candidates.contiguous(),
        is_chain,
        req_pool_indices,
        num_nodes,
        max_len,
        num_candidates,
        INDICES=triton.next_power_of_2(max_len),
        CANDIDATES=triton.next_power_of_2(num_candidates),
        HAS_CANDIDATES=candidates is not None,
        num_warps=1,
    )
