"""What counts of generated tokens do to logits: SGLang's penalties, of whole vocabularies."""

from __future__ import annotations

import torch


def penalties_of(
    counts: torch.Tensor, frequency: torch.Tensor, presence: torch.Tensor, repetition: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What SGLang's penalizers add to logits, and what they scale them by afterwards.

    Args:
        counts: [bs, V] int32, how often each token was generated.
        frequency, presence, repetition: [bs] float32.

    Returns:
        [bs, V] float32 addends and [bs, V] float32 factors, which divide positive logits and multiply others.
    """
    seen = counts > 0
    addends = -(frequency[:, None] * counts) - presence[:, None] * seen
    return addends, torch.where(seen, repetition[:, None], 1.0)
