"""Bigram tables of prompts, in one launch with one thread block per request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.kernels.add_bigrams import TABLE_SIZE, locate


@triton.jit
def _begin_bigrams_kernel(tables, req_pool_indices, texts, text_stride, next_tokens, newest):
    request = tl.program_id(0).to(tl.int64)
    texts += request * text_stride
    newest += request * TABLE_SIZE
    num_tokens = tl.load(texts)
    every = tl.arange(0, TABLE_SIZE)
    tl.store(newest + every, every * 0)
    # The atomic operations below need the stores of all threads, and the last load needs all atomic operations.
    tl.debug_barrier()
    is_pair = every < num_tokens
    first = tl.load(texts + 1 + every, mask=is_pair, other=0)
    second = tl.load(texts + 2 + every, mask=every + 1 < num_tokens, other=0)
    next_token = tl.load(next_tokens + request).to(tl.int32)
    slot, tag = locate(first, tl.where(every + 1 < num_tokens, second, next_token))
    # Of pairs with the same index the last one has the largest number; the number ends with the pair's tag.
    number = ((every + 1) << 16) | (tag.to(tl.int32) & 0xFFFF)
    tl.atomic_max(newest + slot, number, mask=is_pair, sem="relaxed")
    tl.debug_barrier()
    row = tl.load(req_pool_indices + request).to(tl.int64)
    # Load from L2, where atomic operations take effect; L1 may be stale.
    tl.store(tables + row * TABLE_SIZE + every, tl.load(newest + every, cache_modifier=".cg").to(tl.int16))


def begin_bigrams(
    tables: torch.Tensor, req_pool_indices: torch.Tensor, texts: torch.Tensor, next_tokens: torch.Tensor
) -> None:
    """See :func:`sglang_dflash.ops.reference.begin_bigrams.begin_bigrams`."""
    if len(texts):
        newest = torch.empty((len(texts), TABLE_SIZE.value), dtype=torch.int32, device=tables.device)
        _begin_bigrams_kernel[(len(texts),)](
            tables, req_pool_indices, texts, texts.stride(0), next_tokens, newest, num_warps=8
        )
