"""The largest values of every row, in torch."""

from __future__ import annotations

import torch


def top_columns(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k largest values of every row and the logarithm of the sum of all their exponentials.

    Args:
        values: [rows, columns] float32, bfloat16 or float16, without NaN or infinity; rows may be strided, columns not.
        k: at most 16, and as many as there are columns.

    Returns:
        values: [rows, k] float32, descending.
        columns: [rows, k] int64; of equal values the first ones come first.
        log_sums: [rows] float32.
    """
    values = values.float()
    # A stable sort keeps the order of equal values, which topk does not promise.
    largest, columns = values.sort(dim=-1, descending=True, stable=True)
    return largest[:, :k].contiguous(), columns[:, :k].contiguous(), values.logsumexp(dim=-1)
