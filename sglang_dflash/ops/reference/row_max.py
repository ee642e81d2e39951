"""The largest value of every row, in torch."""

from __future__ import annotations

import torch


def row_max(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest value of every row, and the first column that has it.

    Args:
        values: [rows, columns], floating-point; rows may be strided, columns not. A NaN is never the largest.

    Returns:
        maxima: [rows], of the same dtype; -inf where there are only NaN.
        columns: [rows] int64.
    """
    maxima, columns = values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).max(dim=-1)
    return maxima, columns
