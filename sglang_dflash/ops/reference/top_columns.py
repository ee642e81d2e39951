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
    # topk keeps neither the order of equal values nor the lowest columns of those equal to the k-th. A stable sort of a
    # vocabulary does, but takes twenty times as long.
    largest, found = values.topk(min(k + 1, values.shape[1]), dim=-1)
    columns, order = found[:, :k].sort(dim=-1)
    best, order = largest.gather(1, order).sort(dim=-1, descending=True, stable=True)
    columns = columns.gather(1, order)
    is_tied = (largest[:, k:] == largest[:, k - 1 : k]).any(dim=-1)
    columns[is_tied] = values[is_tied].sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return best, columns, values.logsumexp(dim=-1)
