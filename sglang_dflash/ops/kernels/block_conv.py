"""Convolution over the rows of each block, a program for a part of a row's channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Channels per program.
_CHANNELS = 512


@triton.jit
def _block_conv_kernel(
    x,
    x_stride,
    delta,
    base,
    out,
    num_channels,
    rows,
    SIDE: tl.constexpr,
    TAPS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS_OF_GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < num_channels
    place = row % rows
    base += SIDE * TAPS * num_channels + channel
    delta += (row * 2 + SIDE) * TAPS * GROUPS + channel // CHANNELS_OF_GROUP
    x += row * x_stride + channel
    total = tl.zeros([CHANNELS], tl.float32)
    for tap in tl.static_range(TAPS):
        # The rows before the first one of a block are zeros.
        is_taken = is_channel & (place >= tap)
        weight = tl.load(base + tap * num_channels, mask=is_taken, other=0.0).to(tl.float32)
        weight += tl.load(delta + tap * GROUPS, mask=is_taken, other=0.0).to(tl.float32)
        total += weight * tl.load(x - tap * x_stride, mask=is_taken, other=0.0).to(tl.float32)
    tl.store(out + row * num_channels + channel, total.to(out.dtype.element_ty), mask=is_channel)


def block_conv(x: torch.Tensor, delta: torch.Tensor, base: torch.Tensor, side: int, rows: int) -> torch.Tensor:
    """See :func:`sglang_dflash.ops.reference.block_conv.block_conv`."""
    num_rows, num_channels = x.shape
    taps, groups = delta.shape[2:]
    out = torch.empty((num_rows, num_channels), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    assert x.stride(1) == 1 and delta.is_contiguous() and base.is_contiguous()
    assert x.dtype == delta.dtype == base.dtype and num_rows % rows == 0
    _block_conv_kernel[(triton.cdiv(num_channels, _CHANNELS), num_rows)](
        x,
        x.stride(0),
        delta,
        base,
        out,
        num_channels,
        rows,
        SIDE=side,
        TAPS=taps,
        GROUPS=groups,
        CHANNELS_OF_GROUP=num_channels // groups,
        CHANNELS=min(_CHANNELS, triton.next_power_of_2(num_channels)),
        num_warps=4,
    )
    return out
