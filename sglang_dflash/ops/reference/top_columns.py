"""Top-k of every row, in torch."""

from __future__ import annotations

import torch


def top_columns(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the k largest values of every row, their columns, and the log-sum-exp of the row.

    Args:
        values: [rows, columns] float32, bfloat16 or float16, without NaN or infinity. Rows may be strided, columns not.
        k: at most 16 and at most the number of columns.

    Returns:
        values: [rows, k] float32, descending.
        columns: [rows, k] int64. Of equal values the lower column comes first.
        log_sums: [rows] float32.
    """
    values = values.float()
    # A stable sort keeps the order of equal values. topk does not guarantee it.
    largest, columns = values.sort(dim=-1, descending=True, stable=True)
    return largest[:, :k].contiguous(), columns[:, :k].contiguous(), values.logsumexp(dim=-1)
