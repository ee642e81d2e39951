"""Acceptance of a prefix of the drafts, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.types import Acceptance


@triton.jit
def _accept_prefix_kernel(
    block_tokens,
    target_tokens,
    seq_lens,
    out_tokens,
    accept_lens,
    bonus_tokens,
    new_seq_lens,
    BLOCK_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, PADDED)
    valid = index < BLOCK_SIZE
    is_draft = index < BLOCK_SIZE - 1
    base = request * BLOCK_SIZE
    draft = tl.load(block_tokens + base + index + 1, mask=is_draft, other=-1)
    target = tl.load(target_tokens + base + index, mask=valid, other=-1)
    first_wrong = tl.where(is_draft & (draft == target), BLOCK_SIZE, index)
    num_correct_drafts = tl.min(first_wrong, axis=0)
    bonus = tl.load(target_tokens + base + num_correct_drafts)
    accept_len = (num_correct_drafts + 1).to(tl.int64)
    tl.store(out_tokens + base + index, tl.where(index <= num_correct_drafts, target, 0), mask=valid)
    tl.store(accept_lens + request, accept_len)
    tl.store(bonus_tokens + request, bonus)
    tl.store(new_seq_lens + request, tl.load(seq_lens + request).to(tl.int64) + accept_len)


def accept_prefix(block_tokens: torch.Tensor, target_tokens: torch.Tensor, seq_lens: torch.Tensor) -> Acceptance:
    """See :func:`sglang_dflash.ops.reference.accept_prefix.accept_prefix`."""
    bs, block_size = block_tokens.shape
    accepted = Acceptance.empty(bs, block_size, block_tokens.device)
    if bs:
        _accept_prefix_kernel[(bs,)](
            block_tokens=block_tokens.contiguous(),
            target_tokens=target_tokens.contiguous(),
            seq_lens=seq_lens,
            out_tokens=accepted.out_tokens,
            accept_lens=accepted.accept_lens,
            bonus_tokens=accepted.bonus_tokens,
            new_seq_lens=accepted.new_seq_lens,
            BLOCK_SIZE=block_size,
            PADDED=triton.next_power_of_2(block_size),
            num_warps=1,
        )
    return accepted
