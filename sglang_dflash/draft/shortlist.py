"""Draft tokens by a shortlist: a float8 copy of the lm_head selects the tokens whose logits are computed.

Most bytes that a drafter reads are those of the lm_head. A chain needs only a few best tokens of each position, and a
tree their probabilities. The float8 copy is half as large. It finds the best tokens of every group, and the
logits of these are then computed with the original weights. Drafts rarely differ from those of the full product, and
the target decides what is committed.
"""

from __future__ import annotations

import logging
import weakref

import torch
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.utils import log_info_on_rank0

from sglang_dflash import ops
from sglang_dflash.ops.reference.shortlist_top import DEPTH, GROUP, quantize_rows, spread
from sglang_dflash.ops.weight_copy import WeightCopy
from sglang_dflash.server_args.arguments import runs_cycles
from sglang_dflash.vocab.copied import copied_weight

logger = logging.getLogger(__name__)

_shortlists: weakref.WeakSet[Shortlist] = weakref.WeakSet()


class Shortlist:
    """Finds the best tokens of this rank's shard of an lm_head for the drafter's hidden states."""

    def __init__(self, weight: torch.Tensor, k: int) -> None:
        """
        Args:
            weight: [V, H] bfloat16 or float16, contiguous. The shard's vocabulary without padding.
            k: tokens to find.
        """
        self._weight, self._k = weight, k
        self._copy = WeightCopy(weight, quantize_rows, spread(len(weight), weight.device))
        _shortlists.add(self)

    @classmethod
    def of(cls, lm_head: VocabParallelEmbedding, k: int) -> Shortlist | None:
        """Return the shortlist of an lm_head; None if it would not be faster, or the server only prefills."""
        weight = copied_weight(lm_head, DEPTH) if runs_cycles() else None
        if weight is None:
            return None
        log_info_on_rank0(
            logger, f"Drafts are chosen by a copy of the lm_head in float8, {weight.numel() >> 20} MiB of each GPU."
        )
        return cls(weight, k)

    def __call__(
        self, hidden_states: torch.Tensor, has_sums: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return logits, columns of the shard's vocabulary, and log-sum-exps for hidden states [bs, W - 1, H].

        See :func:`sglang_dflash.ops.reference.shortlist_top.shortlist_top`.
        """
        return ops.shortlist_top(hidden_states, self._weight, *self._copy.tensors, self._k, has_sums)


def is_used() -> bool:
    """Return whether a shortlist chooses the drafts of this process."""
    return len(_shortlists) > 0


def row_bytes(num_columns: int, hidden_size: int) -> int:
    """Return the bytes that a shortlist keeps of one draft's logits while it chooses tokens; an upper bound.

    It keeps the best column and a sum of each group, and the hidden state in float8.
    """
    num_groups = -(-num_columns // GROUP)
    return num_groups * (torch.int32.itemsize + torch.float32.itemsize) + hidden_size + torch.float32.itemsize
