"""Chains of drafts from a table of conditional log probabilities, a warp a request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _follow_table_kernel(
    candidates,
    ranks,
    block_tokens,
    block_stride,
    DEPTHS: tl.constexpr,
    K: tl.constexpr,
    PADDED_DEPTHS: tl.constexpr,
    PADDED: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    candidates += request * DEPTHS * K
    ranks += request * DEPTHS * K * K
    depth, column = tl.arange(0, PADDED_DEPTHS)[:, None], tl.arange(0, PADDED)[None, :]
    place = depth * K + column
    is_place = (depth < DEPTHS) & (column < K)
    # All of them are loaded at once, because the walk would wait for each of its own.
    best = tl.load(ranks + place * K, mask=is_place, other=0).to(tl.int32)
    chosen = tl.sum(tl.where((depth == 0) & (column == 0), best, 0))
    path = tl.where((depth == 0) & (column == 0), chosen, 0)
    for i in range(1, DEPTHS):
        chosen = tl.sum(tl.where((depth == i) & (column == chosen), best, 0))
        path += tl.where((depth == i) & (column == 0), chosen, 0)
    # Column 0 has the path.
    rank = tl.sum(path, axis=1)
    row = tl.arange(0, PADDED_DEPTHS)
    token = tl.load(candidates + row * K + rank, mask=row < DEPTHS, other=0)
    tl.store(block_tokens + request * block_stride + 1 + row, token, mask=row < DEPTHS)


def follow_table(candidates: torch.Tensor, ranks: torch.Tensor, block_tokens: torch.Tensor) -> None:
    """See :func:`sglang_dflash.ops.reference.follow_table.follow_table`."""
    bs, depths, k = candidates.shape
    if bs == 0 or depths == 0:
        return
    assert block_tokens.stride(1) == 1 and ranks.is_contiguous()
    _follow_table_kernel[(bs,)](
        candidates.contiguous(),
        ranks,
        block_tokens,
        block_tokens.stride(0),
        DEPTHS=depths,
        K=k,
        PADDED_DEPTHS=triton.next_power_of_2(depths),
        PADDED=triton.next_power_of_2(k),
        num_warps=1,
    )
