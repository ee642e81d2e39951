"""Top-k of a matrix product for every row, at a quarter or half of the bytes of the full product.

The product of few rows is bound by reading weights. A copy of the weights in int4 has a quarter of the bytes. Tensor
cores multiply int8, so a byte of two weights becomes two bytes of one weight each in registers, times 16. The product
of many rows is bound by the tensor cores, which take a copy in float8 straight from shared memory.

The products are never written: each row keeps the best column of every group, in one integer, and the sum of
exponentials of every tile. Then several thread blocks per row compute the best of those columns at full precision, so
that the weights of all are read at a time. One more launch sorts them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.kernels import pdl
from sglang_dflash.ops.kernels.ordered import LEAST, LOWEST, NO_COLUMN, from_ordered, pop, store_best, to_ordered
from sglang_dflash.ops.kernels.split_rows import round_to_int8
from sglang_dflash.ops.reference.shortlist_top import (
    DEPTH,
    FLOAT8,
    GROUP,
    LARGEST_FLOAT8,
    MAX_INT4_ROWS,
    Float8Copy,
    Int4Copy,
    num_candidates,
    parts_of,
)
from sglang_dflash.ops.reference.split_rows import LARGEST as LARGEST_INT8

_TILE = 128
# Rows of a tile: the least that a tensor core takes, and the most with which two thread blocks of float8 run at a time
# on each multiprocessor. So one computes groups while the other one multiplies.
_MIN_ROWS, _MAX_ROWS = 16, 128
# Depth read at a time, stages, warps. The fastest of those measured. For int4 per maximum of rows in a tile.
_INT4_TILINGS = {32: (DEPTH, 4, 4), MAX_INT4_ROWS: (DEPTH, 4, 8)}
_FLOAT8_TILING = (128, 3, 4)
# Weights of the candidates of a thread block that are read at a time.
_NUMBERS, _CANDIDATE_WARPS = 8192, 4


@triton.jit
def _quantize_kernel(
    x,
    request_stride,
    row_stride,
    rows_per_request,
    factors,
    rows8,
    row_scales,
    size_k,
    LARGEST: tl.constexpr,
    K: tl.constexpr,
    IS_INT8: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.arange(0, K)
    inside = column < size_k
    pdl.wait_and_release(PDL)
    row = tl.program_id(0).to(tl.int64)
    x += row // rows_per_request * request_stride + row % rows_per_request * row_stride
    number = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if IS_INT8:
        number *= tl.load(factors + column, mask=inside, other=0.0)
    largest = tl.max(tl.abs(number))
    # The maximum leaves NaN out.
    is_finite = tl.sum(tl.abs(number)) < float("inf")
    scale = tl.div_rn(largest, LARGEST * 1.0)
    tl.store(row_scales + row, tl.where(is_finite, scale, float("nan")))
    number = tl.div_rn(number, tl.where(scale > 0, scale, 1.0))
    number = round_to_int8(number, LARGEST) if IS_INT8 else tl.minimum(tl.maximum(number, -LARGEST), LARGEST)
    tl.store(rows8 + row * size_k + column, number.to(rows8.dtype.element_ty), mask=inside)


@triton.jit
def _unpack(packed, IS_COMPILED: tl.constexpr):
    """Return the numbers in the high and in the low bits of bytes, times 16.

    Triton shifts bytes one by one. The instructions here take four at a time. Its interpreter has none.
    """
    if IS_COMPILED:
        high = tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0xF0F0F0F0;", "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4
        )
        low = tl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $1, 4; and.b32 $0, t, 0xF0F0F0F0; }",
            "=r,r",
            [packed],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    else:
        high, low = packed & -16, packed << 4
    return high, low


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _shortlist_kernel(
    rows8,
    row_scales,
    numbers,
    scales,
    keys,
    tile_log_sums,
    num_rows,
    num_row_tiles,
    num_columns,
    num_tiles,
    size_k,
    half_k,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    IS_INT4: tl.constexpr,
    IS_COMPILED: tl.constexpr,
    SUMS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait_and_release(PDL)
    # Neighbouring thread blocks read the same weights.
    tile = tl.program_id(0) // num_row_tiles
    in_tile = tl.arange(0, TILE)
    place = tile.to(tl.int64) * TILE + in_tile
    # A group takes every `num_groups`-th column (`spread_order`).
    num_groups = tl.cdiv(num_columns, GROUP)
    is_column = (place // GROUP < num_groups) & (place % GROUP * num_groups + place // GROUP < num_columns)
    row = (tl.program_id(0) % num_row_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    scale = tl.load(scales + place, mask=is_column, other=0.0)
    if IS_INT4:
        # A byte has two numbers that are half a step apart.
        HALF: tl.constexpr = DEPTH // 2
        in_half = tl.arange(0, HALF)
        sums = tl.zeros((TILE, ROWS), tl.int32)
        of_rows = rows8 + row[None, :] * size_k + in_half[:, None]
        for start in tl.range(0, half_k, HALF, num_stages=STAGES):
            at = numbers + place[:, None] * half_k + (start + in_half)[None, :]
            high, low = _unpack(tl.load(at, mask=is_column[:, None], other=0), IS_COMPILED)
            rows = tl.load(of_rows + 2 * start, mask=is_row[None, :], other=0)
            sums = tl.dot(high, rows, sums, out_dtype=tl.int32)
            rows = tl.load(of_rows + (2 * start + HALF), mask=is_row[None, :], other=0)
            sums = tl.dot(low, rows, sums, out_dtype=tl.int32)
        total = sums.to(tl.float32)
        scale /= 16
    else:
        total = tl.zeros((TILE, ROWS), tl.float32)
        for start in tl.range(0, size_k, DEPTH, num_stages=STAGES):
            k = start + tl.arange(0, DEPTH)
            weights = tl.load(numbers + place[:, None] * size_k + k[None, :], mask=is_column[:, None], other=0.0)
            rows = tl.load(rows8 + row[None, :] * size_k + k[:, None], mask=is_row[None, :], other=0.0)
            total = tl.dot(weights, rows, total)
    total *= scale[:, None]
    total *= tl.load(row_scales + row, mask=is_row, other=0.0)[None, :]
    total = tl.where((total == total) & is_column[:, None], total, float("-inf"))
    # The low bits of a key give the column in its group. Lower columns have larger keys.
    key = (to_ordered(total) & -GROUP) | (GROUP - 1 - in_tile % GROUP)[:, None]
    key = tl.where(is_column[:, None], key, LOWEST)
    GROUPS: tl.constexpr = TILE // GROUP
    group = tile.to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    best = tl.max(tl.reshape(key, (GROUPS, GROUP, ROWS)), axis=1)
    tl.store(keys + row[None, :] * num_tiles * GROUPS + group[:, None], best, mask=is_row[None, :])
    if SUMS:
        largest = tl.maximum(tl.max(total, axis=0), LEAST)
        log_sum = largest + tl.log(tl.sum(tl.exp(total - largest[None, :]), axis=0))
        tl.store(tile_log_sums + row * num_tiles + tile, log_sum, mask=is_row)


@triton.jit
def _candidates_kernel(
    x,
    request_stride,
    row_stride,
    rows_per_request,
    weight,
    keys,
    keys_stride,
    num_groups,
    size_k,
    candidates,
    estimates,
    logits,
    PARTS: tl.constexpr,
    QUOTA: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait_and_release(PDL)
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    group = tl.arange(0, PADDED_GROUPS) * PARTS + part
    group_keys = tl.load(keys + row * keys_stride + group, mask=group < num_groups, other=LOWEST)
    rank = tl.arange(0, QUOTA)
    key = tl.full((QUOTA,), LOWEST, tl.int32)
    column = tl.full((QUOTA,), NO_COLUMN, tl.int32)
    for i in range(QUOTA):
        best, of_group, group_keys = pop(group_keys, group)
        is_found = (rank == i) & (of_group != NO_COLUMN)
        key = tl.where(is_found, best, key)
        column = tl.where(is_found, (GROUP - 1 - (best & (GROUP - 1))) * num_groups + of_group, column)

    is_column = column != NO_COLUMN
    x += row // rows_per_request * request_stride + row % rows_per_request * row_stride
    start = weight + tl.where(is_column, column, 0).to(tl.int64)[:, None] * size_k
    total = tl.zeros((QUOTA, BLOCK), tl.float32)
    for first in range(0, size_k, BLOCK):
        k = first + tl.arange(0, BLOCK)
        number = tl.load(x + k, mask=k < size_k, other=0.0).to(tl.float32)
        weights = tl.load(start + k[None, :], mask=is_column[:, None] & (k < size_k)[None, :], other=0.0)
        total += weights.to(tl.float32) * number[None, :]
    # Rounded as the product would be.
    logit = tl.sum(total, axis=1).to(x.dtype.element_ty).to(tl.float32)
    at = (row * PARTS + part) * QUOTA + rank
    tl.store(candidates + at, column)
    # The key of -inf without its low bits is that of NaN.
    estimate = from_ordered(key & -GROUP)
    tl.store(estimates + at, tl.where(is_column & (estimate == estimate), estimate, float("-inf")))
    tl.store(logits + at, tl.where(is_column & (logit == logit), logit, float("-inf")))


@triton.jit
def _best_kernel(
    candidates,
    estimates,
    logits,
    tile_log_sums,
    num_tiles,
    best_logits,
    best_columns,
    log_sums,
    K: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PADDED_TILES: tl.constexpr,
    SUMS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait_and_release(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = row * CANDIDATES + tl.arange(0, CANDIDATES)
    column, logit = tl.load(candidates + at), tl.load(logits + at)
    # Of equal logits the lower column comes first.
    key = tl.where(column != NO_COLUMN, to_ordered(logit), LOWEST)
    store_best(key, column, best_logits + row * K, best_columns + row * K, K)
    if SUMS:
        tile = tl.arange(0, PADDED_TILES)
        of_tiles = tl.load(tile_log_sums + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
        largest = tl.maximum(tl.maximum(tl.max(of_tiles), tl.max(logit)), LEAST)
        # Replace the estimates of the candidates by their logits.
        others = tl.sum(tl.exp(of_tiles - largest)) - tl.sum(tl.exp(tl.load(estimates + at) - largest))
        total_sum = tl.maximum(others, 0.0) + tl.sum(tl.exp(logit - largest))
        tl.store(log_sums + row, largest + tl.log(total_sum))


def shortlist_top(
    x: torch.Tensor, weight: torch.Tensor, copy: Int4Copy | Float8Copy, k: int, has_sums: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See :func:`sglang_dflash.ops.reference.shortlist_top.shortlist_top`."""
    (bs, rows_per_request, size_k), num_columns = x.shape, weight.shape[0]
    num_rows, device, is_int4 = bs * rows_per_request, x.device, isinstance(copy, Int4Copy)
    num_groups = triton.cdiv(num_columns, GROUP)
    assert x.stride(2) == 1 and size_k % DEPTH == 0 and k <= num_groups
    assert weight.is_contiguous() and copy.numbers.is_contiguous() and copy.scales.is_contiguous()
    assert num_rows <= MAX_INT4_ROWS or not is_int4
    logits = torch.empty((num_rows, k), dtype=torch.float32, device=device)
    columns = torch.empty((num_rows, k), dtype=torch.int64, device=device)
    log_sums = torch.empty(num_rows, dtype=torch.float32, device=device) if has_sums else None
    if num_rows == 0:
        return logits, columns, log_sums
    num_tiles = triton.cdiv(num_columns, _TILE)
    keys_stride = num_tiles * (_TILE // GROUP)
    rows8 = torch.empty((num_rows, size_k), dtype=torch.int8 if is_int4 else FLOAT8, device=device)
    row_scales = torch.empty(num_rows, dtype=torch.float32, device=device)
    keys = torch.empty((num_rows, keys_stride), dtype=torch.int32, device=device)
    tile_log_sums = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=device) if has_sums else None
    pdl_is_available = pdl.is_available(device)
    rows = (x, x.stride(0), x.stride(1), rows_per_request)
    _quantize_kernel[(num_rows,)](
        *rows,
        copy.factors if is_int4 else None,
        rows8,
        row_scales,
        size_k,
        LARGEST=LARGEST_INT8 if is_int4 else LARGEST_FLOAT8,
        K=triton.next_power_of_2(size_k),
        IS_INT8=is_int4,
        PDL=pdl_is_available,
        launch_pdl=pdl_is_available,
    )
    tile_rows = min(_MAX_ROWS, max(_MIN_ROWS, triton.next_power_of_2(num_rows)))
    num_row_tiles = triton.cdiv(num_rows, tile_rows)
    tiling = next(of for most, of in _INT4_TILINGS.items() if tile_rows <= most) if is_int4 else _FLOAT8_TILING
    depth, stages, num_warps = tiling
    _shortlist_kernel[(num_tiles * num_row_tiles,)](
        rows8,
        row_scales,
        copy.numbers,
        copy.scales,
        keys,
        tile_log_sums,
        num_rows,
        num_row_tiles,
        num_columns,
        num_tiles,
        size_k,
        size_k // 2,
        ROWS=tile_rows,
        TILE=_TILE,
        GROUP=GROUP,
        DEPTH=depth,
        STAGES=stages,
        IS_INT4=is_int4,
        IS_COMPILED=not triton.knobs.runtime.interpret,
        SUMS=has_sums,
        PDL=pdl_is_available,
        num_warps=num_warps,
        launch_pdl=pdl_is_available,
    )
    candidates = num_candidates(k, is_int4)
    parts, quota = parts_of(candidates)
    of_candidates = torch.empty((3, num_rows, candidates), dtype=torch.float32, device=device)
    candidate_columns, estimates, candidate_logits = of_candidates.view(torch.int32)[0], *of_candidates[1:]
    _candidates_kernel[(num_rows * parts,)](
        *rows,
        weight,
        keys,
        keys_stride,
        num_groups,
        size_k,
        candidate_columns,
        estimates,
        candidate_logits,
        PARTS=parts,
        QUOTA=quota,
        GROUP=GROUP,
        PADDED_GROUPS=triton.next_power_of_2(triton.cdiv(num_groups, parts)),
        BLOCK=_NUMBERS // quota,
        PDL=pdl_is_available,
        num_warps=_CANDIDATE_WARPS,
        launch_pdl=pdl_is_available,
    )
    _best_kernel[(num_rows,)](
        candidate_columns,
        estimates,
        candidate_logits,
        tile_log_sums,
        num_tiles,
        logits,
        columns,
        log_sums,
        K=k,
        CANDIDATES=candidates,
        PADDED_TILES=triton.next_power_of_2(num_tiles),
        SUMS=has_sums,
        PDL=pdl_is_available,
        num_warps=1,
        launch_pdl=pdl_is_available,
    )
    return logits, columns, log_sums
