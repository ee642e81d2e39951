"""Division of the keys of a batch of trees into chunks of about one size, in one launch that a CUDA graph can hold."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 32


@triton.jit
def _divide_keys_kernel(
    seq_lens,
    req_pool_indices,
    bs,
    window,
    num_nodes,
    unit,
    min_chunk,
    max_chunks,
    chunks,
    part_indptr,
    HAS_WINDOW: tl.constexpr,
    PADDED_BS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0)
    others = tl.arange(0, PADDED_BS)
    is_request = others < bs
    contexts = tl.load(seq_lens + others, mask=is_request, other=0).to(tl.int32)
    firsts = tl.maximum(contexts - window, 0) if HAS_WINDOW else tl.zeros_like(contexts)
    num_keys = tl.where(is_request, contexts + num_nodes - firsts, 0)
    low = min_chunk + tl.zeros((), tl.int32)
    high = tl.maximum(low, tl.max(num_keys))
    while low < high:
        middle = (low + high) // 2
        if tl.sum(tl.where(is_request, tl.maximum((num_keys + middle // 2) // middle, 1), 0)) > max_chunks:
            low = middle + 1
        else:
            high = middle
    counts = tl.maximum((num_keys + low // 2) // low, 1)
    sizes = tl.cdiv(num_keys, counts * unit) * unit
    # Fewer, where sizes were rounded up much.
    counts = tl.where(is_request, tl.cdiv(num_keys, tl.maximum(sizes, 1)), 0)
    parts = tl.where(counts > 1, counts, 0)
    is_before, is_own = others < request, others == request
    before, first_part = tl.sum(tl.where(is_before, counts, 0)), tl.sum(tl.where(is_before, parts, 0))
    count, size = tl.sum(tl.where(is_own, counts, 0)), tl.sum(tl.where(is_own, sizes, 0))
    context, first = tl.sum(tl.where(is_own, contexts, 0)), tl.sum(tl.where(is_own, firsts, 0))

    pool_row = tl.load(req_pool_indices + request).to(tl.int32)
    lane = tl.arange(0, TILE)
    for start in range(0, count, TILE):
        chunk = start + lane
        is_chunk = chunk < count
        out = chunks + (before + chunk) * COLUMNS
        begin = first + chunk * size
        tl.store(out, request, mask=is_chunk)
        tl.store(out + 1, begin, mask=is_chunk)
        tl.store(out + 2, tl.minimum(begin + size, context + num_nodes), mask=is_chunk)
        tl.store(out + 3, tl.where(count > 1, first_part + chunk, -1), mask=is_chunk)
        tl.store(out + 4, context, mask=is_chunk)
        tl.store(out + 5, pool_row, mask=is_chunk)
    tl.store(part_indptr + request + 1, first_part + tl.where(count > 1, count, 0))
    if request == 0:
        tl.store(part_indptr, 0)
        for start in range(tl.sum(counts) * COLUMNS, max_chunks * COLUMNS, TILE):
            tl.store(chunks + start + lane, -1, mask=start + lane < max_chunks * COLUMNS)


def divide_keys(
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    window: int | None,
    num_nodes: int,
    unit: int,
    min_chunk: int,
    chunks: torch.Tensor,
    part_indptr: torch.Tensor,
) -> None:
    """See :func:`sglang_dflash.ops.reference.divide_keys.divide_keys`."""
    bs, (max_chunks, columns) = seq_lens.shape[0], chunks.shape
    assert max_chunks >= bs and columns == 6 and chunks.is_contiguous()
    if bs == 0:
        chunks.fill_(-1)
        part_indptr.zero_()
        return
    _divide_keys_kernel[(bs,)](
        seq_lens,
        req_pool_indices,
        bs,
        0 if window is None else window,
        num_nodes,
        unit,
        min_chunk,
        max_chunks,
        chunks,
        part_indptr,
        HAS_WINDOW=window is not None,
        PADDED_BS=triton.next_power_of_2(bs),
        COLUMNS=columns,
        TILE=_TILE,
        num_warps=1,
    )
