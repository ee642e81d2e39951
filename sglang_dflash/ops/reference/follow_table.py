"""Chains of drafts from a table of conditional log probabilities, in torch."""

from __future__ import annotations

import torch


def follow_table(candidates: torch.Tensor, ranks: torch.Tensor, block_tokens: torch.Tensor) -> None:
    """Write the drafts of chains: at every position the most probable candidate after the draft before it.

    Args:
        candidates: [bs, D, K] int64. Draft tokens of position d.
        ranks: [bs, D, K, K] uint8. Entry [i, d, a, 0] is the most probable candidate after candidate a of position
            d - 1; see :func:`sglang_dflash.ops.reference.fill_table.fill_table`. At d = 0 all a have the same.
        block_tokens: [bs, 1 + D] int64; the rows may be strided. All columns but the first are written.
    """
    bs, depths, _ = candidates.shape
    best = ranks[..., 0].long()
    chosen = torch.zeros((bs, 1), dtype=torch.int64, device=candidates.device)
    for depth in range(depths):
        chosen = best[:, depth].gather(1, chosen)
        block_tokens[:, 1 + depth] = candidates[:, depth].gather(1, chosen)[:, 0]
