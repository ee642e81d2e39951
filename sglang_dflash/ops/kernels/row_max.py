"""Maximum of every row of vocabulary size. Several thread blocks share a row, which is read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 2048
_MIN_COLUMNS = 4096
# Thread blocks that saturate the memory bandwidth of any GPU.
_ENOUGH_BLOCKS = 512


@triton.jit
def _row_max_kernel(
    values,
    row_stride,
    num_columns,
    columns_per_part,
    maxima,
    columns,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    begin = part * columns_per_part
    end = tl.minimum(begin + columns_per_part, num_columns)
    lane = tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_column = tl.full((TILE,), 0, tl.int32) + begin
    for start in range(begin, end, TILE):
        column = start + lane
        value = tl.load(values + row * row_stride + column, mask=column < end, other=float("-inf")).to(tl.float32)
        is_better = value > best
        best = tl.where(is_better, value, best)
        best_column = tl.where(is_better, column, best_column)
    maximum = tl.max(best)
    first = tl.min(tl.where(best == maximum, best_column, num_columns))
    out = row * tl.num_programs(1) + part
    tl.store(maxima + out, maximum)
    tl.store(columns + out, first.to(tl.int64))


@triton.jit
def _merge_parts_kernel(part_maxima, part_columns, num_parts, maxima, columns, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PADDED)
    valid = part < num_parts
    value = tl.load(part_maxima + row * num_parts + part, mask=valid, other=float("-inf"))
    column = tl.load(part_columns + row * num_parts + part, mask=valid, other=2**62)
    maximum = tl.max(value)
    tl.store(maxima + row, maximum)
    tl.store(columns + row, tl.min(tl.where(value == maximum, column, 2**62)))


def row_max(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`sglang_dflash.ops.reference.row_max.row_max`."""
    num_rows, num_columns = values.shape
    maxima = torch.empty(num_rows, dtype=values.dtype, device=values.device)
    columns = torch.empty(num_rows, dtype=torch.int64, device=values.device)
    if num_rows == 0:
        return maxima, columns
    num_parts = max(1, min(_ENOUGH_BLOCKS // num_rows, triton.cdiv(num_columns, _MIN_COLUMNS)))
    columns_per_part = triton.cdiv(num_columns, num_parts)
    num_parts = triton.cdiv(num_columns, columns_per_part)
    part_maxima, part_columns = maxima, columns
    if num_parts > 1:
        part_maxima = torch.empty((num_rows, num_parts), dtype=torch.float32, device=values.device)
        part_columns = torch.empty((num_rows, num_parts), dtype=torch.int64, device=values.device)
    _row_max_kernel[(num_rows, num_parts)](
        values, values.stride(0), num_columns, columns_per_part, part_maxima, part_columns, TILE=_TILE, num_warps=8
    )
    if num_parts > 1:
        _merge_parts_kernel[(num_rows,)](
            part_maxima, part_columns, num_parts, maxima, columns, PADDED=triton.next_power_of_2(num_parts), num_warps=1
        )
    return maxima, columns
