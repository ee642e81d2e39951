"""Linear layer of few rows, optionally with the gated activation after it, at the speed of reading its weights.

Each thread block computes one tile of columns alone, so there is no workspace and no second launch. Speed depends on
the bytes of weights in flight. Tiles and stages are the fastest of those measured on an H100
(scripts/results/linear_h100_2026-11-21.md).

A tensor core's product has at least 64 rows. Up to 64 rows of x, the result's columns take their place. More rows of x
fill them directly; then the tile has as many columns as occupy every multiprocessor once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.kernels import pdl
from sglang_dflash.ops.kernels.early_weights import fetch_early
from sglang_dflash.ops.reference.linear_few_rows import GATED_COLUMNS, GATED_DEPTH, MAX_GATED_ROWS, MAX_ROWS, max_rows

# Smallest dimension of a tensor core's tile.
_MIN_TILE_ROWS = 16
_COLUMNS, _DEPTH, _WARPS = 64, 128, 4
# Tiles in flight. A stage of a gated layer has two tiles of weights.
_STAGES, _GATED_STAGES = 6, 4
# Bytes of each column's weights that are brought to the L2 cache early.
_EARLY_BYTES = 256
# Columns of the kernel for more rows: GATED_COLUMNS split in 64 and 32, because Triton's tiles are powers of two.
_WIDE_COLUMNS, _NARROW_COLUMNS, _GATED_WARPS = 64, GATED_COLUMNS - 64, 8


@triton.jit
def _load_weights(weight, row, k, is_column, size_k):
    inside = is_column[:, None] & (k[None, :] < size_k)
    return tl.load(weight + row[:, None] * size_k + k[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_few_rows_kernel(
    x,
    x_stride,
    weight,
    out,
    num_rows,
    num_columns,
    size_k,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_GATED: tl.constexpr,
    STAGES: tl.constexpr,
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
    row = tl.arange(0, ROWS).to(tl.int64)
    total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    gate = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)

    for start in tl.range(0, size_k, DEPTH, num_stages=STAGES):
        k = start + tl.arange(0, DEPTH)
        inside = (row[None, :] < num_rows) & (k[:, None] < size_k)
        rows = tl.load(x + row[None, :] * x_stride + k[:, None], mask=inside, other=0.0)
        total = tl.dot(_load_weights(weight, up_row, k, is_column, size_k), rows, total)
        if IS_GATED:
            gate = tl.dot(_load_weights(weight, column, k, is_column, size_k), rows, gate)

    total = activate(gate, total, out.dtype.element_ty) if IS_GATED else total.to(out.dtype.element_ty)
    inside = is_column[:, None] & (row[None, :] < num_rows)
    tl.store(out + row[None, :] * num_columns + column[:, None], total, mask=inside)


@triton.jit
def activate(gate, up, dtype):
    """Return silu(gate) * up. Both are rounded to `dtype` first, as a layer's result is."""
    gate = gate.to(dtype).to(tl.float32)
    return (up.to(dtype).to(tl.float32) * gate / (1 + tl.exp(-gate))).to(dtype)


@triton.jit
def _weight_columns(weight, column, k, size_k):
    """Load weights as the right operand of a product, [depth, columns]."""
    return tl.load(weight + column[None, :] * size_k + k[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _linear_gated_rows_kernel(
    x,
    x_stride,
    weight,
    out,
    num_rows,
    num_columns,
    size_k,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait_and_release(PDL)
    row = tl.arange(0, ROWS).to(tl.int64)
    is_row = (row < num_rows)[:, None]
    wide = tl.program_id(0).to(tl.int64) * (WIDE + NARROW) + tl.arange(0, WIDE)
    narrow = tl.program_id(0).to(tl.int64) * (WIDE + NARROW) + WIDE + tl.arange(0, NARROW)
    wide_gate = tl.zeros((ROWS, WIDE), dtype=tl.float32)
    wide_up = tl.zeros((ROWS, WIDE), dtype=tl.float32)
    narrow_gate = tl.zeros((ROWS, NARROW), dtype=tl.float32)
    narrow_up = tl.zeros((ROWS, NARROW), dtype=tl.float32)

    for start in tl.range(0, size_k, DEPTH, num_stages=STAGES):
        k = start + tl.arange(0, DEPTH)
        rows = tl.load(x + row[:, None] * x_stride + k[None, :], mask=is_row, other=0.0)
        wide_gate = tl.dot(rows, _weight_columns(weight, wide, k, size_k), wide_gate)
        wide_up = tl.dot(rows, _weight_columns(weight, wide + num_columns, k, size_k), wide_up)
        narrow_gate = tl.dot(rows, _weight_columns(weight, narrow, k, size_k), narrow_gate)
        narrow_up = tl.dot(rows, _weight_columns(weight, narrow + num_columns, k, size_k), narrow_up)

    out += row[:, None] * num_columns
    tl.store(out + wide[None, :], activate(wide_gate, wide_up, out.dtype.element_ty), mask=is_row)
    tl.store(out + narrow[None, :], activate(narrow_gate, narrow_up, out.dtype.element_ty), mask=is_row)


def linear_few_rows(x: torch.Tensor, weight: torch.Tensor, is_gated: bool) -> torch.Tensor:
    """See :func:`sglang_dflash.ops.reference.linear_few_rows.linear_few_rows`."""
    num_columns, size_k = weight.shape[0] // (2 if is_gated else 1), weight.shape[1]
    assert x.shape[0] <= max_rows(num_columns, size_k, is_gated)
    if x.shape[0] > MAX_ROWS:
        return _launch_gated_rows(x, weight)
    return launch(x, weight, is_gated, _COLUMNS, _DEPTH, _WARPS, _GATED_STAGES if is_gated else _STAGES)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    is_gated: bool,
    columns: int,
    depth: int,
    warps: int,
    stages: int,
    early_bytes: int = _EARLY_BYTES,
) -> torch.Tensor:
    """Run :func:`linear_few_rows` with explicit tiles, for `scripts/bench_linear.py`.

    Args:
        columns, depth: of a tile of weights.
        warps: of a thread block.
        stages: tiles in flight.
        early_bytes: bytes of each column's weights to bring to the L2 cache early: 0, or a power of two from 128.
    """
    num_rows, size_k = x.shape
    assert num_rows <= MAX_ROWS and x.stride(1) == 1 and weight.is_contiguous()
    num_columns = weight.shape[0] // (2 if is_gated else 1)
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    pdl_is_available = pdl.is_available(x.device)
    _linear_few_rows_kernel[(triton.cdiv(num_columns, columns),)](
        x,
        x.stride(0),
        weight,
        out,
        num_rows,
        num_columns,
        size_k,
        ROWS=max(_MIN_TILE_ROWS, triton.next_power_of_2(num_rows)),
        COLUMNS=columns,
        DEPTH=depth,
        IS_GATED=is_gated,
        STAGES=stages,
        EARLY_BYTES=early_bytes,
        PDL=pdl_is_available,
        num_warps=warps,
        launch_pdl=pdl_is_available,
    )
    return out


def _launch_gated_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    num_rows, size_k = x.shape
    num_columns = weight.shape[0] // 2
    assert x.stride(1) == 1 and weight.is_contiguous()
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    pdl_is_available = pdl.is_available(x.device)
    _linear_gated_rows_kernel[(num_columns // GATED_COLUMNS,)](
        x,
        x.stride(0),
        weight,
        out,
        num_rows,
        num_columns,
        size_k,
        ROWS=MAX_GATED_ROWS,
        WIDE=_WIDE_COLUMNS,
        NARROW=_NARROW_COLUMNS,
        DEPTH=GATED_DEPTH,
        STAGES=_GATED_STAGES,
        PDL=pdl_is_available,
        num_warps=_GATED_WARPS,
        launch_pdl=pdl_is_available,
    )
    return out
