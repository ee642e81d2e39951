"""Page table of a drafter with a sliding window, in torch."""

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
    """Copy the page table entries of every request's window and block to the front of its row of `out`.

    The window starts at `max(0, seq_len - window)`, rounded down to a page boundary. Paged attention reads whole
    pages, so a row must start with one.

    Args:
        req_to_token: [request slots, positions] int32. KV slot of every position, the block's included.
        req_pool_indices: [bs] int64. Request slots: the rows of `req_to_token` and of `out`.
        seq_lens: [bs] int64. Committed tokens that have KV.
        window: context tokens to keep, at least 1.
        page_size: tokens per page.
        block_size: W. Tokens of the block after the context.
        out: [request slots, >= window + page_size - 1 + W] int32. Only the rows of this batch are written. Entries
            after their context and block keep their values.

    Returns:
        context_lens: [bs] int64. Context tokens in each row, at most window + page_size - 1.
    """
    start = (seq_lens - window).clamp(min=0) // page_size * page_size
    context_lens = seq_lens - start
    for row, first, length in zip(req_pool_indices.tolist(), start.tolist(), context_lens.tolist(), strict=True):
        end = length + block_size
        out[row, :end] = req_to_token[row, first : first + end]
    return context_lens
