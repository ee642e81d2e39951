"""Rows as sums of two int8 parts, in torch."""

from __future__ import annotations

from typing import NamedTuple

import torch

LARGEST = 127
# Steps of the low part in one step of the high part. Half a step of the high part is LARGEST steps of the low one.
LOW_STEPS = 2 * LARGEST
# Rows with a smaller scale become zeros: the inverse of the scale would overflow.
LEAST_SCALE = torch.finfo(torch.float32).tiny


class SplitRows(NamedTuple):
    """Rows in two int8 parts: `scales * (parts[0] + parts[1] / LOW_STEPS)` approximates them.

    Attributes:
        parts: [2, T, K] int8, contiguous. High and low, in -LARGEST..LARGEST.
        scales: [T] float32. The largest magnitude of the row, over LARGEST. It is 0 where the parts are 0.
        norms: [T] float32. L2 norm of the row.
        errors: [T] float32. L2 norm of the row minus what its parts stand for.
    """

    parts: torch.Tensor
    scales: torch.Tensor
    norms: torch.Tensor
    errors: torch.Tensor


def split_rows(x: torch.Tensor) -> SplitRows:
    """Split rows in two int8 parts, with about 16 bits for the largest number of a row.

    Args:
        x: [T, K] bfloat16 or float16. Rows may be strided, columns not. The scale of a row with NaN or infinity is not
            finite, and its parts are undefined.
    """
    numbers = x.float()
    largest = numbers.abs().amax(dim=-1)
    # On a GPU torch multiplies by the inverse of a number that it is to divide by, and divides by a tensor.
    scales = largest / torch.full_like(largest, LARGEST)
    scales = torch.where(scales < LEAST_SCALE, 0.0, scales)
    inverse = torch.where(scales == 0, 0.0, 1.0 / scales)
    scaled = (numbers * inverse[:, None]).nan_to_num()
    high = round_to_int8(scaled)
    rest = scaled - high
    low = round_to_int8(rest * LOW_STEPS)
    errors = torch.where(scales[:, None] == 0, numbers, (rest - low / LOW_STEPS) * scales[:, None])
    parts = torch.stack((high, low)).to(torch.int8)
    return SplitRows(parts, scales, numbers.norm(dim=-1), errors.norm(dim=-1))


def round_to_int8(numbers: torch.Tensor) -> torch.Tensor:
    """Round to integers in -LARGEST..LARGEST, halves up, as kernels do on every device."""
    return (numbers + 0.5).floor().clamp(-LARGEST, LARGEST)
