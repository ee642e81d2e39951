"""Draft tokens by a shortlist: a copy of the lm_head in float8 says which tokens are worth computing.

The lm_head is what a drafter reads most of, and all that is asked of it is each row's best token, or a tree's few best
and how probable they are. Its weights in float8 are half as many bytes; what they name as best of every group of tokens
is close, and the first of those are computed by the weights as they are, so that hardly a draft is another one. What is
committed is the target's choice either way.
"""

from __future__ import annotations

import logging
import weakref

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.utils import log_info_on_rank0

from sglang_dflash import ops
from sglang_dflash.ops import small_m_linear
from sglang_dflash.ops.reference.shortlist_top import DEPTH, FLOAT8, quantize_rows
from sglang_dflash.verify.vocab_shard import vocab_parts

logger = logging.getLogger(__name__)

# The smallest lm_head that is taken: smaller ones are read so fast that launches count.
_MIN_NUMBERS = 1 << 28
# Rows that are quantised at a time, which takes memory for them in float32, three times.
_ROWS = 1024

_shortlists: weakref.WeakSet[Shortlist] = weakref.WeakSet()


class Shortlist:
    """Finds the best tokens of this rank's shard of an lm_head, for every row of a drafter."""

    def __init__(self, weight: torch.Tensor, k: int) -> None:
        """
        Args:
            weight: [N, K] bfloat16 or float16, contiguous, of the shard's vocabulary without padding. It may change:
                see :func:`weights_have_changed`.
            k: how many to find.
        """
        self._weight, self._k = weight, k
        # In memory that stays: CUDA graphs hold its address.
        self._numbers = torch.empty_like(weight, dtype=FLOAT8)
        self._scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
        self._is_stale = True
        self.refresh()
        _shortlists.add(self)

    @classmethod
    def of(cls, lm_head: VocabParallelEmbedding, k: int) -> Shortlist | None:
        """Of an lm_head that gains by it, where products may be others than SGLang's."""
        if not small_m_linear.may_replace():
            return None
        parts = vocab_parts(lm_head)
        if type(lm_head.quant_method) is not UnquantizedEmbeddingMethod or len(parts) != 1:
            return None
        first, num_columns, _ = parts[0]
        weight = lm_head.weight.data[first : first + num_columns]
        # Of the last rank, which may have fewer tokens, as of the others: keys of ranks have to be alike.
        is_large = lm_head.weight.numel() >= _MIN_NUMBERS
        if not small_m_linear.is_measured(weight) or not is_large or weight.shape[1] % DEPTH:
            return None
        log_info_on_rank0(
            logger, f"Drafts are chosen by a copy of the lm_head in float8, {weight.numel() >> 20} MiB of each GPU."
        )
        return cls(weight, k)

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Of rows [bs, rows of each, K]: logits, columns of the shard's vocabulary and sums, see
        :func:`sglang_dflash.ops.reference.shortlist_top.shortlist_top`."""
        return ops.shortlist_top(hidden_states, self._weight, self._numbers, self._scales, self._k)

    def weights_have_changed(self) -> None:
        self._is_stale = True

    @torch.no_grad()
    def refresh(self) -> None:
        """Before a draft: make the copy anew if weights have changed."""
        if not self._is_stale:
            return
        self._is_stale = False
        for start in range(0, self._weight.shape[0], _ROWS):
            rows = slice(start, start + _ROWS)
            self._numbers[rows], self._scales[rows] = quantize_rows(self._weight[rows])


def is_used() -> bool:
    """Return whether a shortlist chooses the drafts of this process."""
    return len(_shortlists) > 0


def weights_have_changed() -> None:
    """Note that weights of an lm_head of this process may have changed.

    Updates come in parts, so copies wait for the next draft.
    """
    for shortlist in _shortlists:
        shortlist.weights_have_changed()
