"""Pearson's chi-square test."""

from __future__ import annotations

import torch


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the probability of counts that differ more from the expected ones. Rare cells (< 10) are one cell.

    Args:
        observed, expected: [cells].
    """
    if observed[expected == 0].any():
        return 0.0
    is_rare = expected < 10
    observed = torch.cat([observed[~is_rare], observed[is_rare].sum()[None]]).double()
    expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]]).double()
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(expected) - 1.0, device=statistic.device).double()
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
