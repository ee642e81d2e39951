"""Rows that are scaled to the largest number of a format of fewer bits."""

from __future__ import annotations

import torch


def scale_rows(x: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale rows so that the largest magnitude of each is `largest`.

    Args:
        x: [rows, depth] floating-point.
        largest: of the format.

    Returns:
        numbers: [rows, depth] float32. `numbers * scales` is x. A row of zeros stays one.
        scales: [rows] float32.
    """
    of_rows = x.abs().amax(dim=-1).float()
    # On a GPU torch multiplies by the inverse of a number, which rounds otherwise.
    scales = of_rows / torch.full_like(of_rows, largest)
    return x.float() / torch.where(scales > 0, scales, 1.0)[:, None], scales
