"""The best column of a product for every row, by half of the bytes that the product would read.

Few rows are multiplied as fast as weights can be read, so a copy in float8 takes half as long, and its results are
never written: of a tile of columns each row's best is kept, in one integer. A thread block per row then reads the
weights of the best of those as they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_dflash.ops.kernels import pdl
from sglang_dflash.ops.kernels.ordered import LOWEST, NO_COLUMN, pop, to_ordered
from sglang_dflash.ops.reference.shortlist_argmax import CANDIDATES, DEPTH, FLOAT8, LARGEST, TILE

# The least that a tensor core's product has of rows; the most that registers have sums for.
_MIN_ROWS, _MAX_ROWS = 16, 256
# Numbers of a row that are read at a time, in how many stages, by how many warps, up to so many rows: as measured.
_TILINGS = {64: (256, 3, 4), 128: (128, 6, 8), _MAX_ROWS: (128, 3, 8)}
# Numbers of each candidate that are read at a time.
_BLOCK, _CANDIDATE_WARPS = 512, 4


@triton.jit
def _quantize_kernel(
    x,
    request_stride,
    row_stride,
    rows_per_request,
    rows8,
    size_k,
    LARGEST: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    x += row // rows_per_request * request_stride + row % rows_per_request * row_stride
    column = tl.arange(0, K)
    number = tl.load(x + column, mask=column < size_k, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(number))
    number *= LARGEST / tl.where(largest > 0, largest, LARGEST)
    number = tl.minimum(tl.maximum(number, -LARGEST), LARGEST)
    tl.store(rows8 + row * size_k + column, number.to(rows8.dtype.element_ty), mask=column < size_k)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _shortlist_kernel(
    rows8,
    weight8,
    scales,
    keys,
    num_rows,
    num_row_tiles,
    num_columns,
    num_tiles,
    size_k,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # Thread blocks beside each other read the same weights.
    tile = tl.program_id(0) // num_row_tiles
    in_tile = tl.arange(0, TILE)
    column = tile.to(tl.int64) * TILE + in_tile
    is_column = column < num_columns
    row = (tl.program_id(0) % num_row_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    total = tl.zeros((TILE, ROWS), tl.float32)
    for start in tl.range(0, size_k, DEPTH, num_stages=STAGES):
        k = start + tl.arange(0, DEPTH)
        numbers = tl.load(weight8 + column[:, None] * size_k + k[None, :], mask=is_column[:, None], other=0.0)
        rows = tl.load(rows8 + row[None, :] * size_k + k[:, None], mask=is_row[None, :], other=0.0)
        total = tl.dot(numbers, rows, total)
    total *= tl.load(scales + column, mask=is_column, other=0.0)[:, None]
    total = tl.where(total == total, total, float("-inf"))
    # The last bits of a number say which column it is of, and first ones are larger.
    key = (to_ordered(total) & -TILE) | (TILE - 1 - in_tile)[:, None]
    best = tl.max(tl.where(is_column[:, None], key, LOWEST), axis=0)
    tl.store(keys + row * num_tiles + tile, best, mask=is_row)


@triton.jit
def _best_candidate_kernel(
    x,
    request_stride,
    row_stride,
    rows_per_request,
    weight,
    keys,
    num_tiles,
    size_k,
    maxima,
    columns,
    TILE: tl.constexpr,
    PADDED_TILES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, PADDED_TILES)
    key = tl.load(keys + row * num_tiles + tile, mask=tile < num_tiles, other=LOWEST)
    rank = tl.arange(0, CANDIDATES)
    column = tl.full((CANDIDATES,), NO_COLUMN, tl.int32)
    for i in range(CANDIDATES):
        best, at, key = pop(key, tile)
        best_column = at * TILE + TILE - 1 - (best & (TILE - 1))
        column = tl.where((rank == i) & (at != NO_COLUMN), best_column, column)

    is_column = column != NO_COLUMN
    x += row // rows_per_request * request_stride + row % rows_per_request * row_stride
    start = weight + tl.where(is_column, column, 0).to(tl.int64)[:, None] * size_k
    total = tl.zeros((CANDIDATES, BLOCK), tl.float32)
    for first in range(0, size_k, BLOCK):
        k = first + tl.arange(0, BLOCK)
        number = tl.load(x + k, mask=k < size_k, other=0.0).to(tl.float32)
        weights = tl.load(start + k[None, :], mask=is_column[:, None] & (k < size_k)[None, :], other=0.0)
        total += weights.to(tl.float32) * number[None, :]
    # Rounded as the product would be: of equal ones it is the first column.
    logit = tl.sum(total, axis=1).to(maxima.dtype.element_ty).to(tl.float32)
    logit = tl.where(is_column & (logit == logit), logit, float("-inf"))
    maximum = tl.max(logit)
    tl.store(maxima + row, maximum.to(maxima.dtype.element_ty))
    first_column = tl.min(tl.where(is_column & (logit == maximum), column, NO_COLUMN))
    tl.store(columns + row, first_column.to(tl.int64))


def shortlist_argmax(
    x: torch.Tensor, weight: torch.Tensor, weight8: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`sglang_dflash.ops.reference.shortlist_argmax.shortlist_argmax`."""
    (bs, rows_per_request, size_k), num_columns = x.shape, weight.shape[0]
    assert x.stride(2) == 1 and size_k % DEPTH == 0
    assert weight.is_contiguous() and weight8.is_contiguous() and scales.is_contiguous()
    num_rows = bs * rows_per_request
    maxima = torch.empty(num_rows, dtype=x.dtype, device=x.device)
    columns = torch.empty(num_rows, dtype=torch.int64, device=x.device)
    if num_rows == 0:
        return maxima, columns
    num_tiles = triton.cdiv(num_columns, TILE)
    rows8 = torch.empty((num_rows, size_k), dtype=FLOAT8, device=x.device)
    keys = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=x.device)
    pdl_is_available = pdl.is_available(x.device)
    rows = (x, x.stride(0), x.stride(1), rows_per_request)
    _quantize_kernel[(num_rows,)](
        *rows,
        rows8,
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
        weight8,
        scales,
        keys,
        num_rows,
        num_row_tiles,
        num_columns,
        num_tiles,
        size_k,
        ROWS=tile_rows,
        TILE=TILE,
        DEPTH=depth,
        STAGES=stages,
        PDL=pdl_is_available,
        num_warps=num_warps,
        launch_pdl=pdl_is_available,
    )
    _best_candidate_kernel[(num_rows,)](
        *rows,
        weight,
        keys,
        num_tiles,
        size_k,
        maxima,
        columns,
        TILE=TILE,
        PADDED_TILES=triton.next_power_of_2(num_tiles),
        CANDIDATES=CANDIDATES,
        BLOCK=_BLOCK,
        PDL=pdl_is_available,
        num_warps=_CANDIDATE_WARPS,
        launch_pdl=pdl_is_available,
    )
    return maxima, columns
