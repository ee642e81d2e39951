"""Tokens that a prefill draws, by the noise of their requests (:mod:`sglang_dflash.ops.noise`).

SGLang's sampler draws the token after a prompt. A request may come to that draw again: a retracted request is
prefilled with what it has generated. When it is retracted depends on the drafts that were accepted, and so on its
noise. Its next token must therefore be drawn by that noise, as a decode cycle would have drawn it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_dflash import ops
from sglang_dflash.types import DrawParameters


@dataclass(frozen=True)
class PrefillDraws:
    """Requests of one prefill.

    Attributes:
        keys: [bs] int64. Keys of their noise.
        is_drawn: [bs] bool. Requests that draw by it: those of the fast path that sample.
    """

    keys: torch.Tensor
    is_drawn: torch.Tensor

    def draw(
        self, tokens: torch.Tensor, probs: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor
    ) -> torch.Tensor:
        """Replace the tokens of requests that draw by their noise.

        Args:
            tokens: [bs] integers, which SGLang drew.
            probs: [bs, V] float32, after temperature.
            info: of the batch.
            positions: [bs] int64. Positions of the prompts' last tokens.

        Returns:
            [bs], like `tokens`.
        """
        logits = probs.log()
        maxima, drawn = ops.row_max(logits)
        parameters = DrawParameters(torch.ones_like(info.top_ps), info.top_ks, info.top_ps, info.min_ps)
        ops.sample_rows(logits, maxima, drawn, parameters, self.keys, positions)
        return torch.where(self.is_drawn, drawn.to(tokens.dtype), tokens)


# Draws of the next prefill, by the target's sampler.
_draws: weakref.WeakKeyDictionary[Sampler, PrefillDraws] = weakref.WeakKeyDictionary()


def prepare(sampler: Sampler, draws: PrefillDraws) -> None:
    """Have the next call of a sampler draw by noise."""
    _draws[sampler] = draws


def take(sampler: Sampler) -> PrefillDraws | None:
    """Return what :func:`prepare` was given, once."""
    return _draws.pop(sampler, None)
