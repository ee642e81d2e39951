"""Top-k of every row of vocabulary size: one warp per part of a row, then one thread block per row.

A part is read once, in tiles. Lane i reads group i of columns of every tile. It keeps the largest value of its groups,
and the first group that holds it. Take the k best lanes of a row, by value and then by column. Any value in another
lane is worse than at least one value in each of them. So they hold the k largest values, and only they are read again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.kernels import pdl
from sglang_dflash.ops.kernels.ordered import LEAST, LOWEST, NO_COLUMN, pop, store_best, to_ordered

_LANES = 128
# Bytes of a group of columns, which a thread reads at once.
_GROUP_BYTES = 16
# Warps that saturate the memory bandwidth of any GPU.
_ENOUGH_WARPS = 4096
_MIN_TILES = 2
# The k best lanes of a row hold 8 k values of each tile of a part (bfloat16).
_MAX_TILES = 32
# Of those values, the number for each warp.
_VALUES_PER_WARP = 2048

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _best_lanes_kernel(
    values,
    row_stride,
    num_columns,
    columns_per_part,
    lane_maxima,
    lane_columns,
    part_log_sums,
    K: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait_and_release(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    begin = part * columns_per_part
    end = tl.minimum(begin + columns_per_part, num_columns)
    values += row * row_stride
    in_tile = tl.arange(0, LANES) * GROUP
    maximum = tl.full((LANES,), float("-inf"), tl.float32)
    first = begin + in_tile
    first = tl.where(first < end, first, NO_COLUMN)
    # The sum of 2 ** (value * log2(e) - scale).
    total = tl.zeros((LANES,), tl.float32)
    scale = tl.full((LANES,), LEAST * _LOG2_E, tl.float32)
    for start in range(begin, end, LANES * GROUP):
        column = start + in_tile[:, None] + tl.arange(0, GROUP)[None, :]
        value = tl.load(values + column, mask=column < end, other=float("-inf")).to(tl.float32)
        group_maximum = tl.max(value, axis=1)
        is_better = group_maximum > maximum
        maximum = tl.where(is_better, group_maximum, maximum)
        first = tl.where(is_better, start + in_tile, first)
        new_scale = tl.maximum(maximum, LEAST) * _LOG2_E
        total *= tl.exp2(scale - new_scale)
        total += tl.sum(tl.exp2(value * _LOG2_E - new_scale[:, None]), axis=1)
        scale = new_scale

    out = row * tl.num_programs(1) + part
    largest = tl.max(scale)
    log_sum = largest + tl.log2(tl.sum(total * tl.exp2(scale - largest)))
    tl.store(part_log_sums + out, log_sum / _LOG2_E)
    keys = tl.where(first < NO_COLUMN, to_ordered(maximum), LOWEST)
    for i in range(K):
        best, column, keys = pop(keys, first)
        tl.store(lane_maxima + out * K + i, best)
        tl.store(lane_columns + out * K + i, column)


@triton.jit
def _best_columns_kernel(
    values,
    row_stride,
    num_columns,
    columns_per_part,
    lane_maxima,
    lane_columns,
    part_log_sums,
    num_parts,
    best_values,
    best_columns,
    log_sums,
    K: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    PADDED_ENTRIES: tl.constexpr,
    PADDED_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait_and_release(PDL)
    row = tl.program_id(0).to(tl.int64)
    values += row * row_stride
    part = tl.arange(0, PADDED_PARTS)
    part_log_sum = tl.load(part_log_sums + row * num_parts + part, mask=part < num_parts, other=float("-inf"))
    largest = tl.maximum(tl.max(part_log_sum), LEAST)
    tl.store(log_sums + row, largest + tl.log(tl.sum(tl.exp(part_log_sum - largest))))

    entry = tl.arange(0, PADDED_ENTRIES)
    valid = entry < num_parts * K
    keys = tl.load(lane_maxima + row * num_parts * K + entry, mask=valid, other=LOWEST)
    columns = tl.load(lane_columns + row * num_parts * K + entry, mask=valid, other=NO_COLUMN)
    rank = tl.arange(0, PADDED_K)
    lane_column = tl.full((PADDED_K,), NO_COLUMN, tl.int32)
    for i in range(K):
        _, column, keys = pop(keys, columns)
        lane_column = tl.where(rank == i, column, lane_column)

    # All columns of the k best lanes.
    is_lane = lane_column < NO_COLUMN
    lane_column = tl.multiple_of(tl.where(is_lane, lane_column, 0), GROUP)
    begin = lane_column // columns_per_part * columns_per_part
    end = tl.where(is_lane, tl.minimum(begin + columns_per_part, num_columns), 0)
    tile = tl.arange(0, PADDED_TILES)[None, :, None] * (LANES * GROUP)
    columns = (begin + lane_column % (LANES * GROUP))[:, None, None] + tile + tl.arange(0, GROUP)[None, None, :]
    valid = columns < end[:, None, None]
    value = tl.load(values + columns, mask=valid, other=0.0).to(tl.float32)
    keys = tl.where(valid, to_ordered(tl.where(value == value, value, float("-inf"))), LOWEST)
    columns = tl.where(valid, columns, NO_COLUMN)
    store_best(keys, columns, best_values + row * K, best_columns + row * K, K)


def top_columns(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`sglang_dflash.ops.reference.top_columns.top_columns`."""
    num_rows, num_columns = values.shape
    device = values.device
    best_values = torch.empty((num_rows, k), dtype=torch.float32, device=device)
    best_columns = torch.empty((num_rows, k), dtype=torch.int64, device=device)
    log_sums = torch.empty(num_rows, dtype=torch.float32, device=device)
    if num_rows == 0:
        return best_values, best_columns, log_sums
    assert k <= num_columns and values.stride(1) == 1
    group = _GROUP_BYTES // values.itemsize
    tile = _LANES * group
    num_tiles = triton.cdiv(num_columns, tile)
    tiles_per_part = triton.cdiv(num_tiles, max(1, _ENOUGH_WARPS // num_rows))
    tiles_per_part = min(max(tiles_per_part, _MIN_TILES), _MAX_TILES)
    num_parts = triton.cdiv(num_tiles, tiles_per_part)
    lane_maxima, lane_columns = torch.empty((2, num_rows, num_parts, k), dtype=torch.int32, device=device)
    part_log_sums = torch.empty((num_rows, num_parts), dtype=torch.float32, device=device)
    part_arguments = (
        values,
        values.stride(0),
        num_columns,
        tiles_per_part * tile,
        lane_maxima,
        lane_columns,
        part_log_sums,
    )
    pdl_is_available = pdl.is_available(device)
    _best_lanes_kernel[(num_rows, num_parts)](
        *part_arguments, K=k, LANES=_LANES, GROUP=group, PDL=pdl_is_available, num_warps=1
    )
    padded_k, padded_tiles = triton.next_power_of_2(k), triton.next_power_of_2(tiles_per_part)
    _best_columns_kernel[(num_rows,)](
        *part_arguments,
        num_parts,
        best_values,
        best_columns,
        log_sums,
        K=k,
        LANES=_LANES,
        GROUP=group,
        PADDED_K=padded_k,
        PADDED_PARTS=triton.next_power_of_2(num_parts),
        PADDED_ENTRIES=triton.next_power_of_2(num_parts * k),
        PADDED_TILES=padded_tiles,
        PDL=pdl_is_available,
        num_warps=min(max(padded_k * padded_tiles * group // _VALUES_PER_WARP, 1), 4),
        launch_pdl=pdl_is_available,
    )
    return best_values, best_columns, log_sums
