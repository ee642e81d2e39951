"""Largest column of a matrix product for every row, at little more than half the bytes of the product.

The product of few rows is bound by reading weights. An int8 copy of the weights halves the bytes. Its product has a
known error, so it gives an upper bound of each column. Two int8 parts of every row keep the precision of x.

Each row then visits groups of columns in the order of their bounds, and computes them with the weights. It stops when
no bound reaches the best result, which is after one or two groups for most rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.kernels import pdl
from sglang_dflash.ops.kernels.ordered import LOWEST, NO_COLUMN, from_ordered, pop, to_ordered
from sglang_dflash.ops.kernels.split_rows import join_parts, part_starts, split_rows
from sglang_dflash.ops.reference.argmax_product import CONFIDENCE, DEPTH, GROUP
from sglang_dflash.ops.reference.split_rows import LOW_STEPS

_TILE = 128
# Rows of a tile: the least that a tensor core takes, and the most that registers hold sums for.
_MIN_ROWS, _MAX_ROWS = 16, 128
# Per maximum of rows in a tile: depth read at a time, stages, warps. The fastest of those measured.
_TILINGS = {16: (128, 5, 4), 32: (128, 4, 4), 64: (128, 3, 8), _MAX_ROWS: (128, 4, 8)}
# Weights of each column of a group that are read at a time.
_NUMBERS, _WARPS = 1024, 8


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _bounds_kernel(
    parts,
    row_scales,
    row_norms,
    row_errors,
    weight8,
    scales,
    norms,
    bounds,
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
    LOW_STEPS: tl.constexpr,
    CONFIDENCE: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait_and_release(PDL)
    # Neighbouring thread blocks read the same weights.
    tile = tl.program_id(0) // num_row_tiles
    column = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    is_column = column < num_columns
    first_row = (tl.program_id(0) % num_row_tiles).to(tl.int64) * ROWS
    row = first_row + tl.arange(0, ROWS)
    is_row = row < num_rows
    part_start, is_part = part_starts(first_row, num_rows, size_k, ROWS)
    sums = tl.zeros((TILE, 2 * ROWS), tl.int32)
    for start in tl.range(0, size_k, DEPTH, num_stages=STAGES):
        k = start + tl.arange(0, DEPTH)
        numbers = tl.load(weight8 + column[:, None] * size_k + k[None, :], mask=is_column[:, None], other=0)
        rows = tl.load(parts + part_start[None, :] + k[:, None], mask=is_part[None, :], other=0)
        sums = tl.dot(numbers, rows, sums, out_dtype=tl.int32)
    column_scale = tl.load(scales + column, mask=is_column, other=0.0)[:, None]
    total = join_parts(sums, LOW_STEPS)
    total *= tl.load(row_scales + row, mask=is_row, other=0.0)[None, :]
    # The error of the weights, and that of the two parts of x.
    total += CONFIDENCE * tl.load(row_norms + row, mask=is_row, other=0.0)[None, :]
    total *= column_scale
    column_norm = tl.load(norms + column, mask=is_column, other=0.0)[:, None]
    total += column_norm * tl.load(row_errors + row, mask=is_row, other=0.0)[None, :]
    total = tl.where((total == total) & is_column[:, None], total, float("-inf"))
    GROUPS: tl.constexpr = TILE // GROUP
    group = tile.to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    largest = tl.max(tl.reshape(total, (GROUPS, GROUP, ROWS)), axis=1)
    tl.store(bounds + row[None, :] * num_tiles * GROUPS + group[:, None], largest, mask=is_row[None, :])


@triton.jit(do_not_specialize=["num_groups"])
def _best_column_kernel(
    x,
    x_stride,
    weight,
    bounds,
    num_groups,
    num_columns,
    size_k,
    maxima,
    columns,
    GROUP: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait_and_release(PDL)
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    group = tl.arange(0, PADDED_GROUPS)
    bound = tl.load(bounds + row * num_groups + group, mask=group < num_groups, other=float("-inf"))
    # A product is rounded, so its bound is, too.
    keys = to_ordered(bound.to(maxima.dtype.element_ty).to(tl.float32))
    keys = tl.where(bound > float("-inf"), keys, LOWEST)
    best = float("-inf")
    best_column = tl.full((), NO_COLUMN, tl.int32)
    key, first, keys = pop(keys, group)
    # Of groups with the same bound, the first is visited first. A tie matters in lower columns only.
    while (key != LOWEST) & (
        (from_ordered(key) > best) | ((from_ordered(key) == best) & (first * GROUP < best_column))
    ):
        column = first * GROUP + tl.arange(0, GROUP)
        is_column = column < num_columns
        start = weight + column.to(tl.int64)[:, None] * size_k
        total = tl.zeros((GROUP, BLOCK), tl.float32)
        for begin in range(0, size_k, BLOCK):
            k = begin + tl.arange(0, BLOCK)
            number = tl.load(x + k, mask=k < size_k, other=0.0).to(tl.float32)
            weights = tl.load(start + k[None, :], mask=is_column[:, None] & (k < size_k)[None, :], other=0.0)
            total += weights.to(tl.float32) * number[None, :]
        product = tl.sum(total, axis=1).to(maxima.dtype.element_ty).to(tl.float32)
        product = tl.where(is_column & (product == product), product, float("-inf"))
        of_group = tl.max(product)
        first_column = tl.min(tl.where((product == of_group) & is_column, column, NO_COLUMN))
        is_better = (of_group > best) | ((of_group == best) & (first_column < best_column))
        best_column = tl.where(is_better, first_column, best_column)
        best = tl.maximum(best, of_group)
        key, first, keys = pop(keys, group)
    tl.store(maxima + row, best)
    tl.store(columns + row, tl.where(best_column == NO_COLUMN, 0, best_column).to(tl.int64))


def argmax_product(
    x: torch.Tensor, weight: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, norms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`sglang_dflash.ops.reference.argmax_product.argmax_product`."""
    rows = min(_MAX_ROWS, max(_MIN_ROWS, triton.next_power_of_2(x.shape[0])))
    return launch(
        x, weight, numbers, scales, norms, rows, *next(tiling for most, tiling in _TILINGS.items() if rows <= most)
    )


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    norms: torch.Tensor,
    tile_rows: int,
    depth: int,
    stages: int,
    warps: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run :func:`argmax_product` with explicit tiles, for `scripts/bench_kernels.py`."""
    (num_rows, size_k), num_columns = x.shape, weight.shape[0]
    assert weight.shape == numbers.shape == (num_columns, size_k) and weight.dtype == x.dtype
    assert x.stride(1) == 1 and size_k % DEPTH == 0 and DEPTH % depth == 0
    assert weight.is_contiguous() and numbers.is_contiguous() and scales.is_contiguous() and norms.is_contiguous()
    maxima = torch.empty(num_rows, dtype=x.dtype, device=x.device)
    columns = torch.empty(num_rows, dtype=torch.int64, device=x.device)
    if num_rows == 0:
        return maxima, columns
    split = split_rows(x)
    num_tiles, num_row_tiles = triton.cdiv(num_columns, _TILE), triton.cdiv(num_rows, tile_rows)
    num_groups = num_tiles * (_TILE // GROUP)
    bounds = torch.empty((num_rows, num_groups), dtype=torch.float32, device=x.device)
    pdl_is_available = pdl.is_available(x.device)
    _bounds_kernel[(num_tiles * num_row_tiles,)](
        split.parts,
        split.scales,
        split.norms,
        split.errors,
        numbers,
        scales,
        norms,
        bounds,
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
        LOW_STEPS=LOW_STEPS,
        CONFIDENCE=CONFIDENCE,
        PDL=pdl_is_available,
        num_warps=warps,
        launch_pdl=pdl_is_available,
    )
    _best_column_kernel[(num_rows,)](
        x,
        x.stride(0),
        weight,
        bounds,
        num_groups,
        num_columns,
        size_k,
        maxima,
        columns,
        GROUP=GROUP,
        PADDED_GROUPS=triton.next_power_of_2(num_groups),
        BLOCK=min(_NUMBERS, triton.next_power_of_2(size_k)),
        PDL=pdl_is_available,
        num_warps=_WARPS,
        launch_pdl=pdl_is_available,
    )
    return maxima, columns
