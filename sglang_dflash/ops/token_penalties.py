"""SGLang's frequency, presence and repetition penalties for whole vocabularies."""

from __future__ import annotations

import torch


def penalties_of(
    counts: torch.Tensor, frequency: torch.Tensor, presence: torch.Tensor, repetition: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what SGLang's penalizers add to logits, and the factors that they scale them by afterwards.

    Args:
        counts: [bs, V] int32. Number of times that each token was generated.
        frequency, presence, repetition: [bs] float32.

    Returns:
        addends: [bs, V] float32.
        factors: [bs, V] float32. They divide positive logits and multiply others.
    """
    seen = counts > 0
    addends = -(frequency[:, None] * counts) - presence[:, None] * seen
    return addends, torch.where(seen, repetition[:, None], 1.0)
