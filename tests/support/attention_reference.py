"""The masks of drafter layers, dense and in float64: what every attention backend is compared with."""

import torch
from torch import Tensor


def dense_attention(
    queries: Tensor, keys: Tensor, values: Tensor, *, window: int | None, causal: bool, scale: float
) -> Tensor:
    """Attention of one request's last rows.

    Args:
        queries: [Q, Hq, D], at the last Q positions.
        keys, values: [K, Hkv, D], at the positions 0..K-1; query heads share them in groups.
        window: a query at position p sees the keys k with |p - k| < window; None for no limit.
        causal: and only those with k <= p.

    Returns:
        [Q, Hq, D] float64.
    """
    groups = queries.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(groups, dim=1) for x in (keys, values))
    positions = torch.arange(len(keys), device=keys.device)
    distance = positions[-len(queries) :, None] - positions
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window is not None:
        hidden |= distance.abs() >= window
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
