"""Convolution over the rows of each block, in torch."""

from __future__ import annotations

import torch


def block_conv(x: torch.Tensor, delta: torch.Tensor, base: torch.Tensor, side: int, rows: int) -> torch.Tensor:
    """Return sums of each row and the rows right before it in its block, weighted by channel.

    The weight of a row's channel is `base`, which is the same for all rows, plus the row's `delta`, which is the same
    for the G-th part of the channels. Nothing crosses from one block to the next. Sums are in float32, tap 0 first, and
    are rounded once.

    Source: the grouped dynamic convolution of DFlash2 (https://github.com/z-lab/dflash).

    Args:
        x: [T, H]. Blocks of `rows` rows each, one after the other.
        delta: [T, 2, taps, G], contiguous, the dtype of x. G divides H.
        base: [2, taps, H], contiguous, the dtype of x.
        side: which of the two weights are taken: 0 before a layer, 1 after it.
        rows: rows of a block. Divides T.

    Returns:
        [T, H], contiguous, the dtype of x.
    """
    channels_of_group = x.shape[1] // delta.shape[3]
    place = torch.arange(x.shape[0], device=x.device)[:, None] % rows
    total = torch.zeros(x.shape, device=x.device)
    for tap in range(base.shape[1]):
        weight = base[side, tap].float() + delta[:, side, tap].float().repeat_interleave(channels_of_group, dim=1)
        total += torch.where(place >= tap, weight * x.roll(tap, dims=0).float(), 0.0)
    return total.to(x.dtype)
