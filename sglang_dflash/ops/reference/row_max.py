"""Maximum of every row, in torch."""

from __future__ import annotations

import torch


def row_max(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maximum of every row and the first column that holds it. NaN counts as -inf.

    Args:
        values: [rows, columns] floating-point. Rows may be strided, columns not.

    Returns:
        maxima: [rows] of the same dtype. -inf for rows that hold only NaN.
        columns: [rows] int64.
    """
    maxima, columns = values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).max(dim=-1)
    return maxima, columns
