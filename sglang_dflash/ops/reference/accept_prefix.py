"""Acceptance of a drafted prefix in torch."""

from __future__ import annotations

import torch

from sglang_dflash.verify.acceptance import Acceptance


def accept_prefix(block_tokens: torch.Tensor, target_tokens: torch.Tensor, seq_lens: torch.Tensor) -> Acceptance:
    """Longest draft prefix the target agrees with, then the bonus token.

    Args:
        block_tokens: [bs, B] int64, the verified tokens: the last bonus token and B - 1 draft tokens.
        target_tokens: [bs, B] int64, the target's token after each: its argmax, or one drawn from its distribution.
            A drafted token is a point mass, so comparing it with a draw p accepts it with p(token), and a draw that
            differs is distributed as p without that token: rejection sampling without its coins.
        seq_lens: [bs] int64, committed tokens before this block.

    Returns:
        :class:`Acceptance`; output tokens behind the bonus token are 0.
    """
    bs, block_size = block_tokens.shape
    agrees = block_tokens[:, 1:] == target_tokens[:, :-1]
    num_correct_drafts = agrees.to(torch.int64).cumprod(dim=1).sum(dim=1)
    accepted = Acceptance.empty(bs, block_size, block_tokens.device)
    places = torch.arange(block_size, device=block_tokens.device)
    # An accepted draft token equals the target's token after the one before it.
    accepted.out_tokens.copy_(target_tokens.masked_fill(places > num_correct_drafts[:, None], 0))
    accepted.accept_lens.copy_(num_correct_drafts + 1)
    accepted.bonus_tokens.copy_(target_tokens.gather(1, num_correct_drafts[:, None]).squeeze(1))
    accepted.new_seq_lens.copy_(seq_lens + accepted.accept_lens)
    return accepted
