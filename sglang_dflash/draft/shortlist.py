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
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.utils import log_info_on_rank0

from sglang_dflash import ops
from sglang_dflash.ops import small_m_linear
from sglang_dflash.ops.reference.shortlist_top import DEPTH, FLOAT8, GROUP, quantize_rows
from sglang_dflash.server_args.arguments import runs_cycles
from sglang_dflash.vocab.shard import vocab_parts

logger = logging.getLogger(__name__)

# Smallest lm_head that gets a shortlist. A smaller one is read so fast that kernel launches dominate.
_MIN_NUMBERS = 1 << 28
# Rows that are quantised at a time. That takes three times their memory in float32.
_ROWS = 1024

_shortlists: weakref.WeakSet[Shortlist] = weakref.WeakSet()


class Shortlist:
    """Finds the best tokens of this rank's shard of an lm_head for the drafter's hidden states."""

    def __init__(self, weight: torch.Tensor, k: int) -> None:
        """
        Args:
            weight: [V, H] bfloat16 or float16, contiguous. The shard's vocabulary without padding. It may change: see
                :func:`weights_have_changed`.
            k: tokens to find.
        """
        self._weight, self._k = weight, k
        # CUDA graphs hold the address.
        self._numbers = torch.empty_like(weight, dtype=FLOAT8)
        self._scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
        self._is_stale = True
        self.refresh()
        _shortlists.add(self)

    @classmethod
    def of(cls, lm_head: VocabParallelEmbedding, k: int) -> Shortlist | None:
        """Return the shortlist of an lm_head; None if it is too small, quantised, or not faster with one.

        There is none either if SGLang's flags ask for a certain kernel (`small_m_linear.may_replace`), and on a server
        that only prefills.
        """
        if not (small_m_linear.may_replace() and runs_cycles()):
            return None
        parts = vocab_parts(lm_head)
        if type(lm_head.quant_method) is not UnquantizedEmbeddingMethod or len(parts) != 1:
            return None
        first, num_columns, _ = parts[0]
        weight = lm_head.weight.data[first : first + num_columns]
        # The padded size decides, so that the last rank, which may have fewer tokens, decides as the others do.
        is_large = lm_head.weight.numel() >= _MIN_NUMBERS
        if not small_m_linear.is_measured(weight) or not is_large or weight.shape[1] % DEPTH:
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
        return ops.shortlist_top(hidden_states, self._weight, self._numbers, self._scales, self._k, has_sums)

    def weights_have_changed(self) -> None:
        self._is_stale = True

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights again if they have changed. Call it before a cycle."""
        if not self._is_stale:
            return
        self._is_stale = False
        for start in range(0, self._weight.shape[0], _ROWS):
            rows = slice(start, start + _ROWS)
            self._numbers[rows], self._scales[rows] = quantize_rows(self._weight[rows])


def is_used() -> bool:
    """Return whether a shortlist chooses the drafts of this process."""
    return len(_shortlists) > 0


def row_bytes(num_columns: int, hidden_size: int) -> int:
    """Return the bytes that a shortlist keeps of one draft's logits while it chooses tokens; an upper bound.

    It keeps the best column and a sum of each group, and the hidden state in float8.
    """
    num_groups = -(-num_columns // GROUP)
    return num_groups * (torch.int32.itemsize + torch.float32.itemsize) + hidden_size + torch.float32.itemsize


def weights_have_changed() -> None:
    """Note that weights of an lm_head of this process may have changed.

    Updates come in parts, so copies wait for the next draft.
    """
    for shortlist in _shortlists:
        shortlist.weights_have_changed()
