"""Linear layer of few rows with weights in int8, at half the bytes of bfloat16.

Tensor cores take int8 weights straight from shared memory: no tile is converted. Each row enters as two int8 parts
(`split_rows`), which are neighbouring columns of one product, so that weights are read once for both.

Each thread block computes one tile of columns alone. While `split_rows` runs, it already brings its first weights to
the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.kernels import pdl
from sglang_dflash.ops.kernels.early_weights import fetch_early
from sglang_dflash.ops.kernels.linear_few_rows import activate
from sglang_dflash.ops.kernels.split_rows import join_parts, part_starts, split_rows
from sglang_dflash.ops.reference.linear_int8 import DEPTH, MAX_GATED_ROWS, MAX_ROWS, max_rows
from sglang_dflash.ops.reference.split_rows import LOW_STEPS

# Smallest tile of rows. Its parts are twice as many, the least that Triton multiplies.
_MIN_TILE_ROWS = 8
# Per most rows: columns, depth, warps and stages of a tile. A stage of a gated layer has two tiles of weights.
_TILINGS = {MAX_ROWS: (64, 256, 4, 6)}
_GATED_TILINGS = {32: (64, 128, 4, 4), MAX_GATED_ROWS: (64, 128, 8, 3)}
# Bytes of each column's weights that are brought to the L2 cache early.
_EARLY_BYTES = 1024


@triton.jit
def _to_float(total, scales, weight_row, is_column, row_scale, LOW_STEPS: tl.constexpr):
    """Return the products of rows, [columns, rows], for those of their parts, [columns, 2 * rows] int32."""
    scale = tl.load(scales + weight_row, mask=is_column, other=0.0)
    return join_parts(total, LOW_STEPS) * scale[:, None] * row_scale[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def _linear_int8_kernel(
    parts,
    row_scales,
    weight,
    scales,
    out,
    num_rows,
    num_columns,
    size_k,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_GATED: tl.constexpr,
    STAGES: tl.constexpr,
    LOW_STEPS: tl.constexpr,
    EARLY_BYTES: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    up_row = column + num_columns if IS_GATED else column
    if PDL and EARLY_BYTES > 0:
        fetch_early(weight, up_row, is_column, size_k, EARLY_BYTES)
        if IS_GATED:
            fetch_early(weight, column, is_column, size_k, EARLY_BYTES)
    pdl.wait_and_release(PDL)
    part_start, is_part = part_starts(0, num_rows, size_k, ROWS)
    total = tl.zeros((COLUMNS, 2 * ROWS), dtype=tl.int32)
    gate = tl.zeros((COLUMNS, 2 * ROWS), dtype=tl.int32)

    for start in tl.range(0, size_k, DEPTH, num_stages=STAGES):
        k = start + tl.arange(0, DEPTH)
        rows = tl.load(parts + part_start[None, :] + k[:, None], mask=is_part[None, :], other=0)
        numbers = tl.load(weight + up_row[:, None] * size_k + k[None, :], mask=is_column[:, None], other=0)
        total = tl.dot(numbers, rows, total, out_dtype=tl.int32)
        if IS_GATED:
            numbers = tl.load(weight + column[:, None] * size_k + k[None, :], mask=is_column[:, None], other=0)
            gate = tl.dot(numbers, rows, gate, out_dtype=tl.int32)

    row = tl.arange(0, ROWS).to(tl.int64)
    is_row = row < num_rows
    row_scale = tl.load(row_scales + row, mask=is_row, other=0.0)
    result = _to_float(total, scales, up_row, is_column, row_scale, LOW_STEPS)
    if IS_GATED:
        gate_result = _to_float(gate, scales, column, is_column, row_scale, LOW_STEPS)
        result = activate(gate_result, result, out.dtype.element_ty)
    inside = is_column[:, None] & is_row[None, :]
    tl.store(out + row[None, :] * num_columns + column[:, None], result.to(out.dtype.element_ty), mask=inside)


def linear_int8(x: torch.Tensor, weight8: torch.Tensor, scales: torch.Tensor, is_gated: bool) -> torch.Tensor:
    """See :func:`sglang_dflash.ops.reference.linear_int8.linear_int8`."""
    assert x.shape[0] <= max_rows(is_gated) and x.shape[1] % DEPTH == 0
    tilings = _GATED_TILINGS if is_gated else _TILINGS
    tiles = next(tiles for most, tiles in tilings.items() if x.shape[0] <= most)
    return launch(x, weight8, scales, is_gated, *tiles)


def launch(
    x: torch.Tensor,
    weight8: torch.Tensor,
    scales: torch.Tensor,
    is_gated: bool,
    columns: int,
    depth: int,
    warps: int,
    stages: int,
    early_bytes: int = _EARLY_BYTES,
) -> torch.Tensor:
    """Run :func:`linear_int8` with explicit tiles, to measure them.

    Args:
        columns, depth: of a tile of weights. The depth of x is a multiple of the tile's.
        warps: of a thread block.
        stages: tiles in flight.
        early_bytes: bytes of each column's weights to bring to the L2 cache early: 0, or a power of two from 128.
    """
    num_rows, size_k = x.shape
    assert size_k % depth == 0 and weight8.is_contiguous() and scales.is_contiguous()
    num_columns = weight8.shape[0] // (2 if is_gated else 1)
    split = split_rows(x)
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    pdl_is_available = pdl.is_available(x.device)
    _linear_int8_kernel[(triton.cdiv(num_columns, columns),)](
        split.parts,
        split.scales,
        weight8,
        scales,
        out,
        num_rows,
        num_columns,
        size_k,
        ROWS=max(_MIN_TILE_ROWS, triton.next_power_of_2(num_rows)),
        COLUMNS=columns,
        DEPTH=depth,
        IS_GATED=is_gated,
        STAGES=stages,
        LOW_STEPS=LOW_STEPS,
        EARLY_BYTES=early_bytes,
        PDL=pdl_is_available,
        num_warps=warps,
        launch_pdl=pdl_is_available,
    )
    return out
