"""The target's verification logits: in the model's dtype, and in the ranks' shards where that will do.

SGLang widens logits to float32 before sampling. Verification has a row of them for each of a request's B tokens. It
takes an argmax, which a copy cannot change, or draws with a kernel that widens what it has read
(`kernels.sample_rows`). `FallbackSampler` copies the rows that it needs. A copy of all, for a vocabulary of 152k and 32
requests of 16 tokens, moves 470 MB per cycle.

SGLang also gathers the columns of all ranks on each of them, 155 MB for those rows in bfloat16. An argmax needs one
number per row instead (`VocabArgmax`), so cycles of greedy requests alone leave logits where they are. Ranks then hold
the same tokens, as they do of the block that these are compared with.

Otherwise ranks each choose their tokens, on the same bits and with the same random numbers, which follow from a seed
that all ranks have (`DFlashWorker`), so nothing has to be broadcast. Whatever rounding their forwards differ by, a
column of the logits is computed by one rank only, and the others get a copy (`LogitsProcessor._get_logits`, before
this). Where a difference may matter is in the text: another number of ranks sums in another order.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import nn

from sglang_dflash.verify.vocab_argmax import VocabArgmax

_targets: weakref.WeakSet[LogitsProcessor] = weakref.WeakSet()
_in_shards: weakref.WeakSet[LogitsProcessor] = weakref.WeakSet()


class VerifyLogits:
    """What becomes of one target's TARGET_VERIFY logits. From now on they are not widened."""

    def __init__(self, target_model: nn.Module, tp_group: GroupCoordinator) -> None:
        processors = [module for module in target_model.modules() if isinstance(module, LogitsProcessor)]
        # A soft cap is applied after the widening, and needs its precision.
        self._processors = [processor for processor in processors if processor.final_logit_softcapping is None]
        _targets.update(self._processors)
        lm_head = target_model.lm_head
        is_gathered = self._processors == processors and all(
            processor.do_tensor_parallel_all_gather and not processor.do_tensor_parallel_all_gather_dp_attn
            for processor in processors
        )
        self._argmax = None
        if processors and is_gathered and isinstance(lm_head, VocabParallelEmbedding):
            self._argmax = VocabArgmax(lm_head, tp_group)

    @property
    def have_shards(self) -> bool:
        """Whether they can stay in their shards: there are several ranks, and nothing is done to gathered logits."""
        return self._argmax is not None

    @contextmanager
    def in_shards(self, is_asked: bool) -> Iterator[None]:
        """Meanwhile each rank's logits are those of its own part of the vocabulary, if that `is_asked`."""
        if not is_asked:
            yield
            return
        for processor in self._processors:
            processor.do_tensor_parallel_all_gather = False
        _in_shards.update(self._processors)
        try:
            yield
        finally:
            _in_shards.difference_update(self._processors)
            for processor in self._processors:
                processor.do_tensor_parallel_all_gather = True

    def argmax(self, shard: torch.Tensor) -> torch.Tensor:
        """Tokens, [T] int64, of such logits: [T, columns of the shard]."""
        return self._argmax(shard)


def skip_widening(
    original,
    processor: LogitsProcessor,
    logits: torch.Tensor,
    logits_metadata: LogitsMetadata,
    use_buffer: bool = True,
    softcap: float | None = None,
) -> torch.Tensor:
    """AROUND `LogitsProcessor._copy_logits_to_buffer`: [T, padded vocabulary] in, [T, vocabulary] out; shards as they
    are."""
    if processor not in _targets or not logits_metadata.forward_mode.is_target_verify():
        return original(processor, logits, logits_metadata, use_buffer=use_buffer, softcap=softcap)
    if processor in _in_shards:
        return logits
    return logits[:, : processor.vocab_size]
