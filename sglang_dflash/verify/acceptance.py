"""Accepted tokens of one cycle, packed so that one copy takes them out of a CUDA graph's static memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Per request: W output tokens, the accept length, the bonus token, the new sequence length.
_SCALARS_PER_REQUEST = 3


@dataclass(frozen=True)
class Acceptance:
    """Views into one flat int64 buffer `packed` of `[bs * W tokens | bs accept lengths | bs bonus | bs lengths]`.

    Attributes:
        packed: [bs * (W + 3)].
        out_tokens: [bs, W]. The first `accept_lens` of each request are committed. The last of them is its bonus token.
        accept_lens: [bs] in [1, W], with the bonus token.
        bonus_tokens: [bs].
        new_seq_lens: [bs]. `seq_lens + accept_lens`.
    """

    packed: torch.Tensor
    out_tokens: torch.Tensor
    accept_lens: torch.Tensor
    bonus_tokens: torch.Tensor
    new_seq_lens: torch.Tensor

    @classmethod
    def of(cls, packed: torch.Tensor, bs: int, block_size: int) -> Acceptance:
        scalars = packed[bs * block_size :].view(_SCALARS_PER_REQUEST, bs)
        return cls(packed, packed[: bs * block_size].view(bs, block_size), *scalars.unbind())

    @classmethod
    def empty(cls, bs: int, block_size: int, device: torch.device) -> Acceptance:
        packed = torch.empty(bs * (block_size + _SCALARS_PER_REQUEST), dtype=torch.int64, device=device)
        return cls.of(packed, bs, block_size)

    def put(self, index: torch.Tensor, part: Acceptance) -> None:
        """Overwrite the requests at `index`, [n] int64, by those of `part`."""
        self.out_tokens[index] = part.out_tokens
        self.accept_lens[index] = part.accept_lens
        self.bonus_tokens[index] = part.bonus_tokens
        self.new_seq_lens[index] = part.new_seq_lens

    def take(self, bs: int) -> Acceptance:
        """Copy the first `bs` requests, so that the next replay of the graph cannot overwrite them."""
        padded_bs, block_size = self.out_tokens.shape
        copy = Acceptance.of(self.packed.clone(), padded_bs, block_size)
        return Acceptance(
            copy.packed,
            copy.out_tokens[:bs],
            copy.accept_lens[:bs],
            copy.bonus_tokens[:bs],
            copy.new_seq_lens[:bs],
        )
