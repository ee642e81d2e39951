"""Dense attention in float64 with the masks of drafter layers, which every attention backend is compared with."""

import torch
from torch import Tensor


def dense_attention(
    queries: Tensor, keys: Tensor, values: Tensor, *, window: int | None, causal: bool, scale: float
) -> Tensor:
    """Return the attention of one request's last tokens.

    Args:
        queries: [queries, heads, head_dim]. At the last positions.
        keys, values: [keys, kv_heads, head_dim]. At positions 0, 1, ...; groups of query heads share them.
        window: a query at position p sees the keys k with |p - k| < window; None for no limit.
        causal: whether it sees only keys with k <= p.
        scale: of the scores.

    Returns:
        [queries, heads, head_dim] float64.
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
