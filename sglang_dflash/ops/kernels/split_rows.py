"""Rows as sums of two int8 parts, for products with int8 weights.

Tensor cores multiply int8 parts exactly, straight from shared memory. One thread block splits one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.kernels import pdl
from sglang_dflash.ops.reference.split_rows import LARGEST, LEAST_SCALE, LOW_STEPS, SplitRows

# Numbers that a warp holds.
_NUMBERS_PER_WARP = 512
_MIN_WARPS, _MAX_WARPS = 4, 32


@triton.jit
def round_to_int8(numbers, LARGEST: tl.constexpr):
    """Round to integers in -LARGEST..LARGEST, halves up."""
    return tl.minimum(tl.maximum(tl.floor(numbers + 0.5), -LARGEST), LARGEST)


@triton.jit
def part_starts(first_row, num_rows, size_k, ROWS: tl.constexpr):
    """Return where the parts of ROWS rows start, [2 * ROWS], and whether these rows exist.

    High and low part of a row are neighbours, so that one product reads weights once for both.
    """
    part = tl.arange(0, 2 * ROWS)
    row = first_row + (part // 2).to(tl.int64)
    return ((part % 2) * num_rows.to(tl.int64) + row) * size_k, row < num_rows


@triton.jit
def join_parts(sums, LOW_STEPS: tl.constexpr):
    """Return the products of rows over their scales, [columns, rows], for those of their parts, [columns, 2 * rows]."""
    high, low = tl.split(tl.reshape(sums, (sums.shape[0], sums.shape[1] // 2, 2)))
    return high.to(tl.float32) + low.to(tl.float32) / LOW_STEPS


@triton.jit
def _split_rows_kernel(
    x,
    x_stride,
    high_part,
    low_part,
    scales,
    norms,
    errors,
    size_k,
    LARGEST: tl.constexpr,
    LOW_STEPS: tl.constexpr,
    LEAST_SCALE: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait_and_release(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, K)
    inside = column < size_k
    number = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    norm = tl.sqrt_rn(tl.sum(number * number))
    scale = tl.div_rn(tl.max(tl.abs(number)), LARGEST * 1.0)
    scale = tl.where(scale < LEAST_SCALE, 0.0, scale)
    # The maximum leaves NaN out, the norm does not.
    scale = tl.where(norm == norm, scale, norm)
    inverse = tl.where(scale == 0, 0.0, tl.div_rn(1.0, tl.where(scale == 0, 1.0, scale)))
    scaled = number * inverse
    high = round_to_int8(scaled, LARGEST)
    rest = scaled - high
    low = round_to_int8(rest * LOW_STEPS, LARGEST)
    error = tl.where(scale == 0, number, (rest - tl.div_rn(low, LOW_STEPS * 1.0)) * scale)
    tl.store(high_part + row * size_k + column, high.to(tl.int8), mask=inside)
    tl.store(low_part + row * size_k + column, low.to(tl.int8), mask=inside)
    tl.store(scales + row, scale)
    tl.store(norms + row, norm)
    tl.store(errors + row, tl.sqrt_rn(tl.sum(error * error)))


def split_rows(x: torch.Tensor) -> SplitRows:
    """See :func:`sglang_dflash.ops.reference.split_rows.split_rows`."""
    num_rows, size_k = x.shape
    assert x.stride(1) == 1
    parts = torch.empty((2, num_rows, size_k), dtype=torch.int8, device=x.device)
    scales, norms, errors = torch.empty((3, num_rows), dtype=torch.float32, device=x.device).unbind()
    width = triton.next_power_of_2(size_k)
    pdl_is_available = pdl.is_available(x.device)
    _split_rows_kernel[(num_rows,)](
        x,
        x.stride(0),
        *parts.unbind(),
        scales,
        norms,
        errors,
        size_k,
        LARGEST=LARGEST,
        LOW_STEPS=LOW_STEPS,
        LEAST_SCALE=LEAST_SCALE,
        K=width,
        PDL=pdl_is_available,
        num_warps=min(_MAX_WARPS, max(_MIN_WARPS, width // _NUMBERS_PER_WARP)),
        launch_pdl=pdl_is_available,
        # Fused additions would round otherwise than the reference.
        enable_fp_fusion=False,
    )
    return SplitRows(parts, scales, norms, errors)
