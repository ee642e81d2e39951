"""Top-k of a matrix product for every row, at half the bytes of the full product.

The product of few rows is bound by reading weights. A float8 copy of the weights halves the bytes. Its results are
never written: each row keeps the best column of every group, in one integer, and the sum of exponentials of every tile.
Then one thread block per row computes the best of those columns at full precision.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.kernels import pdl
from sglang_dflash.ops.kernels.ordered import LEAST, LOWEST, NO_COLUMN, from_ordered, pop, store_best, to_ordered
from sglang_dflash.ops.reference.shortlist_top import DEPTH, FLOAT8, GROUP, LARGEST, num_candidates

_TILE = 128
# Rows of a tile: the least that a tensor core takes, and the most that registers hold sums for.
_MIN_ROWS, _MAX_ROWS = 16, 256
# Per maximum of rows in a tile: depth read at a time, stages, warps. The fastest of those measured.
_TILINGS = {64: (256, 3, 4), 128: (128, 6, 8), _MAX_ROWS: (128, 3, 8)}
# Weights of all candidates of a row that are read at a time.
_NUMBERS, _CANDIDATE_WARPS = 4096, 4


@triton.jit
def _quantize_kernel(
    x,
    request_stride,
    row_stride,
    rows_per_request,
    rows8,
    row_scales,
    size_k,
    LARGEST: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait_and_release(PDL)
    row = tl.program_id(0).to(tl.int64)
    x += row // rows_per_request * request_stride + row % rows_per_request * row_stride
    column = tl.arange(0, K)
    number = tl.load(x + column, mask=column < size_k, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(number))
    tl.store(row_scales + row, largest / LARGEST)
    number *= LARGEST / tl.where(largest > 0, largest, LARGEST)
    number = tl.minimum(tl.maximum(number, -LARGEST), LARGEST)
    tl.store(rows8 + row * size_k + column, number.to(rows8.dtype.element_ty), mask=column < size_k)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _shortlist_kernel(
    rows8,
    row_scales,
    weight8,
    scales,
    keys,
    tile_log_sums,
    num_rows,
    num_row_tiles,
    num_columns,
    num_tiles,
    size_k,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    SUMS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait_and_release(PDL)
    # Neighbouring thread blocks read the same weights.
    tile = tl.program_id(0) // num_row_tiles
    in_tile = tl.arange(0, TILE)
    place = tile.to(tl.int64) * TILE + in_tile
    # A group takes every `num_groups`-th column (`spread`).
    num_groups = tl.cdiv(num_columns, GROUP)
    is_column = (place // GROUP < num_groups) & (place % GROUP * num_groups + place // GROUP < num_columns)
    row = (tl.program_id(0) % num_row_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    total = tl.zeros((TILE, ROWS), tl.float32)
    for start in tl.range(0, size_k, DEPTH, num_stages=STAGES):
        k = start + tl.arange(0, DEPTH)
        numbers = tl.load(weight8 + place[:, None] * size_k + k[None, :], mask=is_column[:, None], other=0.0)
        rows = tl.load(rows8 + row[None, :] * size_k + k[:, None], mask=is_row[None, :], other=0.0)
        total = tl.dot(numbers, rows, total)
    total *= tl.load(scales + place, mask=is_column, other=0.0)[:, None]
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
def _best_candidates_kernel(
    x,
    request_stride,
    row_stride,
    rows_per_request,
    weight,
    keys,
    tile_log_sums,
    num_columns,
    num_tiles,
    size_k,
    best_logits,
    best_columns,
    log_sums,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_TILES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait_and_release(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, PADDED_TILES * GROUPS)
    num_groups = tl.cdiv(num_columns, GROUP)
    group_keys = tl.load(keys + row * num_tiles * GROUPS + group, mask=group < num_groups, other=LOWEST)
    rank = tl.arange(0, CANDIDATES)
    key = tl.full((CANDIDATES,), LOWEST, tl.int32)
    column = tl.full((CANDIDATES,), NO_COLUMN, tl.int32)
    for i in range(CANDIDATES):
        best, of_group, group_keys = pop(group_keys, group)
        is_found = (rank == i) & (of_group != NO_COLUMN)
        key = tl.where(is_found, best, key)
        column = tl.where(is_found, (GROUP - 1 - (best & (GROUP - 1))) * num_groups + of_group, column)

    is_column = column != NO_COLUMN
    x += row // rows_per_request * request_stride + row % rows_per_request * row_stride
    start = weight + tl.where(is_column, column, 0).to(tl.int64)[:, None] * size_k
    total = tl.zeros((CANDIDATES, BLOCK), tl.float32)
    for first in range(0, size_k, BLOCK):
        k = first + tl.arange(0, BLOCK)
        number = tl.load(x + k, mask=k < size_k, other=0.0).to(tl.float32)
        weights = tl.load(start + k[None, :], mask=is_column[:, None] & (k < size_k)[None, :], other=0.0)
        total += weights.to(tl.float32) * number[None, :]
    # Rounded as the product would be. Of equal logits the lower column comes first.
    logit = tl.sum(total, axis=1).to(x.dtype.element_ty).to(tl.float32)
    logit = tl.where(is_column & (logit == logit), logit, float("-inf"))
    if SUMS:
        tile = tl.arange(0, PADDED_TILES)
        in_float8 = tl.load(tile_log_sums + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
        largest = tl.maximum(tl.maximum(tl.max(in_float8), tl.max(logit)), LEAST)
        # Replace the float8 values of the candidates by their exact ones.
        candidates = tl.where(is_column, from_ordered(key & -GROUP), float("-inf"))
        others = tl.sum(tl.exp(in_float8 - largest)) - tl.sum(tl.exp(candidates - largest))
        total_sum = tl.maximum(others, 0.0) + tl.sum(tl.exp(logit - largest))
        tl.store(log_sums + row, largest + tl.log(total_sum))
    logit_keys = tl.where(is_column, to_ordered(logit), LOWEST)
    store_best(logit_keys, column, best_logits + row * K, best_columns + row * K, K)


def shortlist_top(
    x: torch.Tensor, weight: torch.Tensor, weight8: torch.Tensor, scales: torch.Tensor, k: int, has_sums: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See :func:`sglang_dflash.ops.reference.shortlist_top.shortlist_top`."""
    (bs, rows_per_request, size_k), num_columns = x.shape, weight.shape[0]
    candidates = num_candidates(k)
    assert x.stride(2) == 1 and size_k % DEPTH == 0 and k <= triton.cdiv(num_columns, GROUP)
    assert weight.is_contiguous() and weight8.is_contiguous() and scales.is_contiguous()
    num_rows, device = bs * rows_per_request, x.device
    logits = torch.empty((num_rows, k), dtype=torch.float32, device=device)
    columns = torch.empty((num_rows, k), dtype=torch.int64, device=device)
    log_sums = torch.empty(num_rows, dtype=torch.float32, device=device) if has_sums else None
    if num_rows == 0:
        return logits, columns, log_sums
    num_tiles, groups = triton.cdiv(num_columns, _TILE), _TILE // GROUP
    rows8 = torch.empty((num_rows, size_k), dtype=FLOAT8, device=device)
    row_scales = torch.empty(num_rows, dtype=torch.float32, device=device)
    keys = torch.empty((num_rows, num_tiles * groups), dtype=torch.int32, device=device)
    tile_log_sums = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=device) if has_sums else None
    pdl_is_available = pdl.is_available(device)
    rows = (x, x.stride(0), x.stride(1), rows_per_request)
    _quantize_kernel[(num_rows,)](
        *rows,
        rows8,
        row_scales,
        size_k,
        LARGEST=LARGEST,
        K=triton.next_power_of_2(size_k),
        PDL=pdl_is_available,
        launch_pdl=pdl_is_available,
    )
    tile_rows = min(_MAX_ROWS, max(_MIN_ROWS, triton.next_power_of_2(num_rows)))
    num_row_tiles = triton.cdiv(num_rows, tile_rows)
    depth, stages, num_warps = next(tiling for most, tiling in _TILINGS.items() if tile_rows <= most)
    _shortlist_kernel[(num_tiles * num_row_tiles,)](
        rows8,
        row_scales,
        weight8,
        scales,
        keys,
        tile_log_sums,
        num_rows,
        num_row_tiles,
        num_columns,
        num_tiles,
        size_k,
        ROWS=tile_rows,
        TILE=_TILE,
        GROUP=GROUP,
        DEPTH=depth,
        STAGES=stages,
        SUMS=has_sums,
        PDL=pdl_is_available,
        num_warps=num_warps,
        launch_pdl=pdl_is_available,
    )
    _best_candidates_kernel[(num_rows,)](
        *rows,
        weight,
        keys,
        tile_log_sums,
        num_columns,
        num_tiles,
        size_k,
        logits,
        columns,
        log_sums,
        K=k,
        GROUP=GROUP,
        GROUPS=groups,
        PADDED_TILES=triton.next_power_of_2(num_tiles),
        CANDIDATES=candidates,
        BLOCK=_NUMBERS // candidates,
        SUMS=has_sums,
        PDL=pdl_is_available,
        num_warps=_CANDIDATE_WARPS,
        launch_pdl=pdl_is_available,
    )
    return logits, columns, log_sums
