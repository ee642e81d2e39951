"""The rows of `req_to_token` that a windowed drafter sees, in torch."""

from __future__ import annotations

import torch


def gather_window(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    window: int,
    page_size: int,
    block_size: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """Copy every request's last tokens and its block to the front of its row.

    The context that is left starts at `max(0, seq_len - window)`, rounded down to a page: paged attention reads whole
    pages, so a row must start with one.

    Args:
        req_to_token: [rows, width] int32, KV slot of every position of every request, the block's included.
        req_pool_indices: [bs] int64, rows of `req_to_token` and of `out`.
        seq_lens: [bs] int64, committed tokens that have KV.
        window: context tokens to keep, at least 1.
        block_size: B, rows of the block that follows the context.
        out: [rows, >= window + page_size - 1 + B] int32, written at the rows of this batch; what lies behind their
            context and block is left as it was.

    Returns:
        context_lens: [bs] int64, the context tokens in each row, at most window + page_size - 1.
    """
    start = (seq_lens - window).clamp(min=0) // page_size * page_size
    context_lens = seq_lens - start
    for row, first, length in zip(req_pool_indices.tolist(), start.tolist(), context_lens.tolist(), strict=True):
        end = length + block_size
        out[row, :end] = req_to_token[row, first : first + end]
    return context_lens
