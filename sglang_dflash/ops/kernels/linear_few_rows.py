"""A linear layer of few rows, with or without the gated activation behind it: as fast as its weights can be read.

One tile of columns per thread block, and nothing shared between them: no workspace, no second launch. What matters is
how many bytes of weights are in flight; the tiles and stages are the best of those that were tried on an H100
(scripts/results/linear_h100_2026-11-21.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Of a tensor core's smallest tile; and as many as there are registers for.
_MIN_TILE_ROWS, _MAX_ROWS = 16, 64
_COLUMNS, _DEPTH, _WARPS = 64, 128, 4
# In flight; a gated layer's have two tiles each.
_STAGES, _GATED_STAGES = 6, 4


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
):
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    row = tl.arange(0, ROWS).to(tl.int64)
    # Columns of the result are rows of the tensor cores' product, which has at least 64 of those.
    total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    gate = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    up_row = column + num_columns if IS_GATED else column

    for start in tl.range(0, size_k, DEPTH, num_stages=STAGES):
        k = start + tl.arange(0, DEPTH)
        inside = (row[None, :] < num_rows) & (k[:, None] < size_k)
        rows = tl.load(x + row[None, :] * x_stride + k[:, None], mask=inside, other=0.0)
        total = tl.dot(_load_weights(weight, up_row, k, is_column, size_k), rows, total)
        if IS_GATED:
            gate = tl.dot(_load_weights(weight, column, k, is_column, size_k), rows, gate)

    if IS_GATED:
        gate = gate.to(out.dtype.element_ty).to(tl.float32)
        total = total.to(out.dtype.element_ty).to(tl.float32) * gate / (1 + tl.exp(-gate))
    inside = is_column[:, None] & (row[None, :] < num_rows)
    tl.store(out + row[None, :] * num_columns + column[:, None], total.to(out.dtype.element_ty), mask=inside)


def linear_few_rows(x: torch.Tensor, weight: torch.Tensor, is_gated: bool) -> torch.Tensor:
    """See :func:`sglang_dflash.ops.reference.linear_few_rows.linear_few_rows`."""
    return launch(x, weight, is_gated, _COLUMNS, _DEPTH, _WARPS, _GATED_STAGES if is_gated else _STAGES)


def launch(
    x: torch.Tensor, weight: torch.Tensor, is_gated: bool, columns: int, depth: int, warps: int, stages: int
) -> torch.Tensor:
    """The same with other tiles, for `scripts/bench_linear.py`."""
    num_rows, size_k = x.shape
    assert num_rows <= _MAX_ROWS and x.stride(1) == 1 and weight.is_contiguous()
    num_columns = weight.shape[0] // (2 if is_gated else 1)
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
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
        num_warps=warps,
    )
    return out
