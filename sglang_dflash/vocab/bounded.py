"""Argmax of an lm_head's logits by an int8 copy, which bounds each logit.

Greedy requests need no logits but the largest. The copy has half of the bytes, and says which few tokens may have it.
Their logits are computed with the weights, so the token is that of the full product.
"""

from __future__ import annotations

import logging
from functools import partial

import torch
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.utils import log_info_on_rank0

from sglang_dflash import ops
from sglang_dflash.ops.reference.argmax_product import DEPTH, MAX_ROWS, quantize_randomly
from sglang_dflash.ops.weight_copy import WeightCopy
from sglang_dflash.vocab.copied import copied_weight

logger = logging.getLogger(__name__)


class BoundedHead:
    """Finds the best token of this rank's shard of an lm_head for hidden states of the target."""

    def __init__(self, weight: torch.Tensor) -> None:
        """
        Args:
            weight: [V, H] bfloat16 or float16, contiguous. The shard's vocabulary without padding.
        """
        self._weight = weight
        generator = torch.Generator(weight.device).manual_seed(0)
        self._copy = WeightCopy(weight, partial(quantize_randomly, generator=generator))

    @classmethod
    def of(cls, lm_head: VocabParallelEmbedding) -> BoundedHead | None:
        """Return that of an lm_head; None if it would not be faster (`copied_weight`)."""
        weight = copied_weight(lm_head, DEPTH)
        if weight is None:
            return None
        log_info_on_rank0(
            logger,
            f"Greedy tokens are chosen by a copy of the lm_head in int8, {weight.numel() >> 20} MiB of each GPU.",
        )
        return cls(weight)

    @staticmethod
    def takes(num_rows: int) -> bool:
        """Return whether it is faster than the full product for this number of rows."""
        return num_rows <= MAX_ROWS

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest logits, [T], and their columns of the shard, [T] int64, for hidden states [T, H].

        See :func:`sglang_dflash.ops.reference.argmax_product.argmax_product`.
        """
        return ops.argmax_product(hidden_states, self._weight, *self._copy.tensors)
