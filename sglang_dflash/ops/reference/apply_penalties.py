"""Frequency, presence and repetition penalties in torch."""

from __future__ import annotations

import torch

from sglang_dflash.ops.token_penalties import penalties_of


def apply_penalties(
    logits: torch.Tensor,
    block_tokens: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """Penalise the logits after each token of a block, in place.

    The penalties count the tokens generated so far and the block's tokens up to the one at hand.

    Args:
        logits: [bs * W, V] float32. The target's.
        block_tokens: [bs, W] int64. `counts` includes column 0 already.
        counts: [request slots, V] int32. Number of times that each token was generated.
        slots: [bs] int64. Request slots.
        frequency, presence, repetition: [bs] float32. 0, 0 and 1 leave a request's logits unchanged.
    """
    bs, block_size = block_tokens.shape
    blocks = logits.view(bs, block_size, logits.shape[1])
    generated = counts[slots]
    one = torch.ones((bs, 1), dtype=counts.dtype, device=counts.device)
    for j in range(block_size):
        if j > 0:
            generated.scatter_add_(1, block_tokens[:, j : j + 1], one)
        addends, factors = penalties_of(generated, frequency, presence, repetition)
        adjusted = blocks[:, j] + addends
        blocks[:, j] = torch.where(adjusted < 0, adjusted * factors, adjusted / factors)
