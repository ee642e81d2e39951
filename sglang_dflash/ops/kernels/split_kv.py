"""FlashInfer's split of the KV among thread blocks, computed on the GPU in one launch that a CUDA graph can hold."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.reference.split_kv import MIN_CHUNK
from sglang_dflash.types import KVSplit

_TILE = 64


@triton.jit
def _split_kv_kernel(
    seq_lens,
    bs,
    window,
    block_size,
    rows_per_tile,
    num_tiles,
    max_entries,
    num_slots,
    request_indices,
    qo_tile_indices,
    kv_tile_indices,
    block_valid_mask,
    o_indptr,
    merge_indptr,
    kv_chunk_size,
    HAS_WINDOW: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    PADDED_BS: tl.constexpr,
    PADDED_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0)
    others = tl.arange(0, PADDED_BS)
    is_request = others < bs
    kv_lens = tl.load(seq_lens + others, mask=is_request, other=0).to(tl.int32)
    if HAS_WINDOW:
        kv_lens = tl.minimum(tl.minimum(kv_lens, window) + block_size, window + rows_per_tile)
    else:
        kv_lens += block_size
    kv_lens = tl.where(is_request, kv_lens, 0)
    low = tl.full((), MIN_CHUNK, tl.int32)
    high = tl.max(kv_lens)
    while low < high:
        middle = (low + high) // 2
        if num_tiles * tl.sum(tl.cdiv(kv_lens, middle)) > max_entries:
            low = middle + 1
        else:
            high = middle
    num_chunks = tl.cdiv(kv_lens, low)
    before = tl.sum(tl.where(others < request, num_chunks, 0))
    own = tl.sum(tl.where(others == request, num_chunks, 0))
    total = tl.sum(num_chunks)

    lane = tl.arange(0, TILE)
    for start in range(0, num_tiles * own, TILE):
        entry = start + lane
        valid = entry < num_tiles * own
        out = num_tiles * before + entry
        tl.store(request_indices + out, request, mask=valid)
        tl.store(qo_tile_indices + out, entry // own, mask=valid)
        tl.store(kv_tile_indices + out, entry % own, mask=valid)
        tl.store(block_valid_mask + out, 1, mask=valid)
    tl.store(o_indptr + request + 1, block_size * (before + own))
    row = tl.arange(0, PADDED_BLOCK)
    base = block_size * before
    tl.store(merge_indptr + request * block_size + row + 1, base + (row + 1) * own, mask=row < block_size)
    if request == 0:
        tl.store(o_indptr, 0)
        tl.store(merge_indptr, 0)
        tl.store(kv_chunk_size, low)
        for start in range(num_tiles * total, num_slots, TILE):
            tl.store(block_valid_mask + start + lane, 0, mask=start + lane < num_slots)


def split_kv(
    seq_lens: torch.Tensor,
    window: int | None,
    block_size: int,
    rows_per_token: int,
    rows_per_tile: int,
    max_entries: int,
    split: KVSplit,
) -> None:
    """See :func:`sglang_dflash.ops.reference.split_kv.split_kv`."""
    bs = seq_lens.shape[0]
    _split_kv_kernel[(bs,)](
        seq_lens,
        bs,
        0 if window is None else window,
        block_size,
        rows_per_tile,
        triton.cdiv(block_size * rows_per_token, rows_per_tile),
        max_entries,
        split.block_valid_mask.shape[0],
        split.request_indices,
        split.qo_tile_indices,
        split.kv_tile_indices,
        split.block_valid_mask.view(torch.uint8),
        split.o_indptr,
        split.merge_indptr,
        split.kv_chunk_size,
        HAS_WINDOW=window is not None,
        MIN_CHUNK=MIN_CHUNK,
        PADDED_BS=triton.next_power_of_2(bs),
        PADDED_BLOCK=triton.next_power_of_2(block_size),
        TILE=_TILE,
        num_warps=1,
    )
