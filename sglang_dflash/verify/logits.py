"""The target's logits of verified tokens: in the model's dtype, and in the ranks' shards if all requests are greedy.

SGLang copies logits to float32 before sampling. For a vocabulary of 152k and 32 requests of 16 tokens, that moves
470 MB per cycle. Verification does not need the copy: an argmax is the same without it, and `kernels.sample_rows`
widens what it reads. `FallbackSampler` copies the logits that it needs.

SGLang also gathers the logits of all ranks on every rank, 155 MB for those tokens in bfloat16. An argmax needs one
number per token instead (`VocabArgmax`), so cycles of greedy requests leave logits in their shards.

If logits are gathered, each rank chooses the tokens itself. All ranks have the same logits, because each column is
computed by one rank and copied to the others, and the same noise, because they have the same request keys
(`RequestKeys`). So tokens need no broadcast.
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

from sglang_dflash.vocab.argmax import VocabArgmax

_targets: weakref.WeakSet[LogitsProcessor] = weakref.WeakSet()
_in_shards: weakref.WeakSet[LogitsProcessor] = weakref.WeakSet()


class VerifyLogits:
    """TARGET_VERIFY logits of one target, which are not widened once this exists."""

    def __init__(self, target_model: nn.Module, tp_group: GroupCoordinator) -> None:
        processors = [module for module in target_model.modules() if isinstance(module, LogitsProcessor)]
        # A soft cap is applied to the float32 copy, and needs its precision.
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
        """Return whether logits can stay in shards: there are several ranks, and gathered logits are not changed."""
        return self._argmax is not None

    @contextmanager
    def in_shards(self, is_asked: bool) -> Iterator[None]:
        """Leave logits in their shards inside this context, if that `is_asked`."""
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
        """Return the tokens, [T] int64, of logits in shards, [T, columns of the shard]."""
        return self._argmax(shard)


def skip_widening(
    original,
    processor: LogitsProcessor,
    logits: torch.Tensor,
    logits_metadata: LogitsMetadata,
    use_buffer: bool = True,
    softcap: float | None = None,
) -> torch.Tensor:
    """AROUND `LogitsProcessor._copy_logits_to_buffer`: cut logits of verified tokens to the vocabulary, without a copy.

    Logits that stay in shards are returned unchanged.

    Args:
        logits: [T, padded vocabulary].

    Returns:
        [T, vocabulary]
    """
    if processor not in _targets or not logits_metadata.forward_mode.is_target_verify():
        return original(processor, logits, logits_metadata, use_buffer=use_buffer, softcap=softcap)
    if processor in _in_shards:
        return logits
    return logits[:, : processor.vocab_size]
