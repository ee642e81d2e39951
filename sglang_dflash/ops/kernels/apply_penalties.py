"""Frequency, presence and repetition penalties of a block, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_CHUNK = 1024


@triton.jit
def _apply_penalties_kernel(
    logits,
    logits_stride,
    block_tokens,
    counts,
    counts_stride,
    slots,
    frequencies,
    presences,
    repetitions,
    vocab_size,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request = row // BLOCK_SIZE
    last = row % BLOCK_SIZE
    frequency = tl.load(frequencies + request)
    presence = tl.load(presences + request)
    repetition = tl.load(repetitions + request)
    if (frequency != 0.0) | (presence != 0.0) | (repetition != 1.0):
        token = tl.program_id(1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
        valid = token < vocab_size
        slot = tl.load(slots + request).to(tl.int64)
        count = tl.load(counts + slot * counts_stride + token, mask=valid, other=0)
        for j in range(1, BLOCK_SIZE):
            drafted = tl.load(block_tokens + request * BLOCK_SIZE + j)
            count += ((j <= last) & (token == drafted)).to(tl.int32)
        seen = count > 0
        addend = -(frequency * count.to(tl.float32)) - tl.where(seen, presence, 0.0)
        factor = tl.where(seen, repetition, 1.0)
        address = logits + row * logits_stride + token
        logit = tl.load(address, mask=valid, other=0.0) + addend
        tl.store(address, tl.where(logit < 0, logit * factor, logit / factor), mask=valid)


def apply_penalties(
    logits: torch.Tensor,
    block_tokens: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """See :func:`sglang_dflash.ops.reference.apply_penalties.apply_penalties`."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    _apply_penalties_kernel[(num_rows, triton.cdiv(vocab_size, _CHUNK))](
        logits=logits,
        logits_stride=logits.stride(0),
        block_tokens=block_tokens.contiguous(),
        counts=counts,
        counts_stride=counts.stride(0),
        slots=slots,
        frequencies=frequency,
        presences=presence,
        repetitions=repetition,
        vocab_size=vocab_size,
        BLOCK_SIZE=block_tokens.shape[1],
        CHUNK=_CHUNK,
    )
