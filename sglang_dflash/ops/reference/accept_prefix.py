"""Acceptance of a prefix of the drafts, in torch."""

from __future__ import annotations

import torch

from sglang_dflash.types import Acceptance


def accept_prefix(block_tokens: torch.Tensor, target_tokens: torch.Tensor, seq_lens: torch.Tensor) -> Acceptance:
    """Accept the longest draft prefix that the target agrees with, and add the bonus token.

    Sampled output has the target's distribution. A draft is a point mass, and it is compared with a sample of the
    target's distribution p. It is accepted with probability p(draft). A sample that differs from it is distributed
    as p without the draft. That is rejection sampling with one random number.

    Args:
        block_tokens: [bs, W] int64. The verified tokens: the last bonus token and W - 1 drafts.
        target_tokens: [bs, W] int64. The target's token after each verified token: its argmax, or a sample.
        seq_lens: [bs] int64. Committed tokens before this block.

    Returns:
        :class:`Acceptance`. Output tokens after the bonus token are 0.
    """
    bs, block_size = block_tokens.shape
    agrees = block_tokens[:, 1:] == target_tokens[:, :-1]
    num_correct_drafts = agrees.to(torch.int64).cumprod(dim=1).sum(dim=1)
    accepted = Acceptance.empty(bs, block_size, block_tokens.device)
    indices = torch.arange(block_size, device=block_tokens.device)
    # An accepted draft token equals the target's token after the one before it.
    accepted.out_tokens.copy_(target_tokens.masked_fill(indices > num_correct_drafts[:, None], 0))
    accepted.accept_lens.copy_(num_correct_drafts + 1)
    accepted.bonus_tokens.copy_(target_tokens.gather(1, num_correct_drafts[:, None]).squeeze(1))
    accepted.new_seq_lens.copy_(seq_lens + accepted.accept_lens)
    return accepted
