"""Residual addition and RMS norm, with one thread block per row.

A thread block reads a row once and keeps it in registers. It reads the weights before it waits for the kernel before.
FlashInfer's kernel keeps the row in shared memory and reads the weights after the norm is known. On an H100, for 128
rows of 4096, FlashInfer takes 3.4 us after a product and this kernel 2.8 us. After `linear_few_rows`, which lets the
next kernel start early, they take 2.9 us and 1.6 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_dflash.ops.kernels import pdl

# A thread reads 8 numbers, 16 bytes, at a time. Long rows give each thread more numbers, not more warps.
_NUMBERS_PER_WARP, _MAX_WARPS = 8 * 32, 16


@triton.jit
def _add_rms_norm_kernel(
    x,
    residual,
    weight,
    eps,
    size,
    PADDED_SIZE: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    IS_EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED_SIZE)
    inside = column < size
    scale = WEIGHT_OFFSET + tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if IS_EARLY:
        gdc_wait()
    if PDL:
        # The next kernel may start now; it waits for this one's output itself.
        gdc_launch_dependents()
    at = row * size + column
    total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual + at, total.to(residual.dtype.element_ty), mask=inside)
    total_scale = tl.rsqrt(tl.sum(total * total) / size + eps)
    tl.store(x + at, (total * total_scale * scale).to(x.dtype.element_ty), mask=inside)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float, is_early: bool
) -> None:
    """See :func:`sglang_dflash.ops.reference.add_rms_norm.add_rms_norm`."""
    num_rows, size = x.shape
    assert x.is_contiguous() and residual.is_contiguous() and weight.is_contiguous()
    assert residual.shape == x.shape and residual.dtype == x.dtype
    if not num_rows:
        return
    padded_size = triton.next_power_of_2(size)
    pdl_is_available = pdl.is_available(x.device)
    is_early = is_early and pdl_is_available
    _add_rms_norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        eps,
        size,
        PADDED_SIZE=padded_size,
        WEIGHT_OFFSET=weight_offset,
        IS_EARLY=is_early,
        PDL=pdl_is_available,
        num_warps=min(max(padded_size // _NUMBERS_PER_WARP, 1), _MAX_WARPS),
        launch_pdl=is_early,
    )
