"""FlashInfer's split of the KV among thread blocks, in torch."""

from __future__ import annotations

import torch

from sglang_dflash.types import KVSplit

# FlashInfer uses no smaller chunk.
MIN_CHUNK = 128


def split_kv(
    seq_lens: torch.Tensor,
    window: int | None,
    block_size: int,
    rows_per_token: int,
    rows_per_tile: int,
    max_entries: int,
    split: KVSplit,
) -> None:
    """Split the KV of blocks into chunks of one size, the smallest that gives at most `max_entries` entries.

    Source: `PrefillSplitQOKVIndptr` in flashinfer/attention/scheduler.cuh, for blocks of one length and pages of one
    token.

    Args:
        seq_lens: [bs] int64. Context tokens before each block.
        window: keys to the left that a query sees; None for all.
        block_size: W.
        rows_per_token: query heads per KV head.
        rows_per_tile: query rows that a thread block processes together. A query row is one query head of one token.
        max_entries: limit of entries. It is exceeded only if one chunk per request already exceeds it.
        split: written.
    """
    kv_lens = seq_lens.cpu() if window is None else seq_lens.cpu().clamp(max=window)
    kv_lens = kv_lens + block_size
    if window is not None:
        kv_lens = kv_lens.clamp(max=window + rows_per_tile)
    num_tiles = -(-block_size * rows_per_token // rows_per_tile)
    low, high = MIN_CHUNK, int(kv_lens.max())
    while low < high:
        middle = (low + high) // 2
        if num_tiles * int((-(-kv_lens // middle)).sum()) > max_entries:
            low = middle + 1
        else:
            high = middle
    num_chunks = -(-kv_lens // low)

    entries = torch.tensor(
        [
            (request, qo_tile, kv_tile)
            for request, n in enumerate(num_chunks.tolist())
            for qo_tile in range(num_tiles)
            for kv_tile in range(n)
        ],
        dtype=torch.int32,
        device=seq_lens.device,
    )
    split.request_indices[: len(entries)] = entries[:, 0]
    split.qo_tile_indices[: len(entries)] = entries[:, 1]
    split.kv_tile_indices[: len(entries)] = entries[:, 2]
    split.block_valid_mask[: len(entries)], split.block_valid_mask[len(entries) :] = True, False
    split.o_indptr[0] = split.merge_indptr[0] = 0
    split.o_indptr[1:] = (block_size * num_chunks).cumsum(0)
    split.merge_indptr[1:] = num_chunks.repeat_interleave(block_size).cumsum(0)
    split.kv_chunk_size.fill_(low)
