"""Draft tokens by a shortlist: a copy of the lm_head in fewer bits selects the tokens whose logits are computed.

Most bytes that a drafter reads are those of the lm_head. A chain needs only a few best tokens of each position, and a
tree their probabilities. A copy finds the best tokens of every group, and the logits of these are then computed with
the original weights. Drafts rarely differ from those of the full product, and the target decides what is committed.

The int4 copy, for few rows, has a quarter of the bytes. For many rows the tensor cores are the limit, and float8 needs
no conversion.
"""

from __future__ import annotations

import logging
import weakref
from functools import partial

import torch
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.utils import log_info_on_rank0

from sglang_dflash import ops
from sglang_dflash.ops.reference.shortlist_top import (
    DEPTH,
    GROUP,
    MAX_INT4_ROWS,
    Float8Copy,
    Int4Copy,
    depth_factors,
    num_candidates,
    quantize_float8,
    quantize_int4,
    spread_order,
)
from sglang_dflash.ops.weight_copy import WeightCopy
from sglang_dflash.server_args.arguments import runs_cycles
from sglang_dflash.vocab.copied import copied_weight

logger = logging.getLogger(__name__)

_shortlists: weakref.WeakSet[Shortlist] = weakref.WeakSet()


class Shortlist:
    """Finds the best tokens of this rank's shard of an lm_head for the drafter's hidden states.

    Attributes:
        int4, float8: copies of the shard.
    """

    def __init__(self, weight: torch.Tensor, k: int) -> None:
        """
        Args:
            weight: [V, H] bfloat16 or float16, contiguous. The shard's vocabulary without padding.
            k: tokens to find.
        """
        self._weight, self._k = weight, k
        order, factors = spread_order(len(weight), weight.device), torch.ones(weight.shape[1], device=weight.device)
        quantize = partial(quantize_int4, factors=factors)
        copies = (
            WeightCopy(weight, quantize, order, prepare=lambda weight: factors.copy_(depth_factors(weight))),
            WeightCopy(weight, quantize_float8, order),
        )
        # Referred to here, or weight updates would not reach them.
        self._copies = copies
        self.int4 = Int4Copy(*copies[0].tensors, factors)
        self.float8 = Float8Copy(*copies[1].tensors)
        _shortlists.add(self)

    @classmethod
    def of(cls, lm_head: VocabParallelEmbedding, k: int) -> Shortlist | None:
        """Return the shortlist of an lm_head; None if it would not be faster, or the server only prefills."""
        weight = copied_weight(lm_head, DEPTH) if runs_cycles() else None
        if weight is None:
            return None
        log_info_on_rank0(
            logger,
            f"Drafts are chosen by copies of the lm_head in int4 and float8, {weight.numel() >> 21} and "
            f"{weight.numel() >> 20} MiB of each GPU.",
        )
        return cls(weight, k)

    def __call__(
        self, hidden_states: torch.Tensor, has_sums: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return logits, columns of the shard's vocabulary, and log-sum-exps for hidden states [bs, W - 1, H].

        See :func:`sglang_dflash.ops.reference.shortlist_top.shortlist_top`.
        """
        copy = self.copy_for(hidden_states.shape[0] * hidden_states.shape[1])
        return ops.shortlist_top(hidden_states, self._weight, copy, self._k, has_sums)

    def copy_for(self, num_rows: int) -> Int4Copy | Float8Copy:
        """Return the copy that is faster for this number of rows."""
        return self.int4 if num_rows <= MAX_INT4_ROWS else self.float8


def is_used() -> bool:
    """Return whether a shortlist chooses the drafts of this process."""
    return len(_shortlists) > 0


def row_bytes(num_columns: int, hidden_size: int, k: int) -> int:
    """Return the bytes that a shortlist keeps of one draft's logits while it chooses k tokens; an upper bound.

    It keeps the best column and a sum of each group, the hidden state in 8 bits with its scale, and the column, the
    estimate and the logit of each candidate.
    """
    of_groups = -(-num_columns // GROUP) * (torch.int32.itemsize + torch.float32.itemsize)
    of_candidates = num_candidates(k, is_int4=True) * (torch.int32.itemsize + 2 * torch.float32.itemsize)
    return of_groups + hidden_size + torch.float32.itemsize + of_candidates
