"""The target's logits of verified tokens: in the model's dtype, and not all of them if all requests are greedy.

SGLang copies logits to float32 before sampling. For a vocabulary of 152k and 32 requests of 16 tokens, that moves
470 MB per cycle. Verification does not need the copy: an argmax is the same without it, and `kernels.sample_rows`
widens what it reads. `FallbackSampler` copies the logits that it needs.

SGLang also gathers the logits of all ranks on every rank, 155 MB for those tokens in bfloat16. An argmax needs one
number per token instead (`VocabArgmax`), so cycles of greedy requests leave logits in their shards.

The argmax of few tokens needs even less: most logits are only bounded, by a copy of the lm_head (`BoundedHead`). The
target's forward then returns its last hidden states in place of logits.

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

from sglang_dflash.server_args.arguments import runs_cycles
from sglang_dflash.vocab.argmax import VocabArgmax
from sglang_dflash.vocab.bounded import BoundedHead

_targets: weakref.WeakSet[LogitsProcessor] = weakref.WeakSet()
# Whose logits only an argmax reads at present, and those of them whose target has a `BoundedHead`.
_for_argmax: weakref.WeakSet[LogitsProcessor] = weakref.WeakSet()
_bounded: weakref.WeakSet[LogitsProcessor] = weakref.WeakSet()


class VerifyLogits:
    """TARGET_VERIFY logits of one target, which are not widened once this exists."""

    def __init__(self, target_model: nn.Module, tp_group: GroupCoordinator) -> None:
        processors = [module for module in target_model.modules() if isinstance(module, LogitsProcessor)]
        # A soft cap is applied to the float32 copy, and needs its precision. Gemma 4 changes capped logits afterwards.
        self._processors = [processor for processor in processors if processor.final_logit_softcapping is None]
        _targets.update(self._processors)
        lm_head = target_model.lm_head
        is_plain = (
            bool(processors)
            and self._processors == processors
            and isinstance(lm_head, VocabParallelEmbedding)
            # Logits of a padded vocabulary are cut.
            and all(lm_head.num_embeddings == processor.vocab_size for processor in processors)
        )
        self._has_shards = is_plain and all(map(_is_gathered, processors))
        self._head = None
        # Every logit is in one shard, or some would be of other ranks' tokens.
        is_complete = self._has_shards or tp_group.world_size == 1
        if runs_cycles() and is_plain and is_complete and all(map(_are_products, processors)):
            self._head = BoundedHead.of(lm_head)
        self._argmax = None
        if self._has_shards or self._head is not None:
            self._argmax = VocabArgmax(lm_head, tp_group)

    def has_faster_argmax(self, num_tokens: int) -> bool:
        """Return whether an argmax of this number of tokens needs less than all logits on every rank."""
        return self._has_shards or self._is_bounded(num_tokens)

    def _is_bounded(self, num_tokens: int) -> bool:
        return self._head is not None and self._head.takes(num_tokens)

    @contextmanager
    def for_argmax(self, is_asked: bool, num_tokens: int) -> Iterator[None]:
        """Compute only what :meth:`argmax` needs inside this context, if that `is_asked`.

        Args:
            num_tokens: T, which the target verifies.
        """
        if not is_asked:
            yield
            return
        gathering = [processor.do_tensor_parallel_all_gather for processor in self._processors]
        for processor in self._processors:
            processor.do_tensor_parallel_all_gather = False
        _for_argmax.update(self._processors)
        if self._is_bounded(num_tokens):
            _bounded.update(self._processors)
        try:
            yield
        finally:
            _for_argmax.difference_update(self._processors)
            _bounded.difference_update(self._processors)
            for processor, gathers in zip(self._processors, gathering, strict=True):
                processor.do_tensor_parallel_all_gather = gathers

    def argmax(self, output: torch.Tensor) -> torch.Tensor:
        """Return the tokens, [T] int64, of what the target returned as logits in :meth:`for_argmax`.

        Args:
            output: [T, H] hidden states, or [T, columns of the shard] logits.
        """
        if self._is_bounded(output.shape[0]):
            return self._argmax.of_one_part(*self._head(output))
        return self._argmax(output)


def _is_gathered(processor: LogitsProcessor) -> bool:
    """Return whether logits are gathered from all tensor-parallel ranks, and not changed after it."""
    return processor.do_tensor_parallel_all_gather and not processor.do_tensor_parallel_all_gather_dp_attn


def _are_products(processor: LogitsProcessor) -> bool:
    """Return whether logits are products with the lm_head, rounded to its dtype."""
    return (
        # Others compute something else.
        type(processor) is LogitsProcessor
        and processor.logit_scale is None
        and not (processor.use_fp32_lm_head or processor.use_fp32_lm_head_output)
    )


def skip_lm_head(
    original,
    processor: LogitsProcessor,
    hidden_states: torch.Tensor,
    lm_head: nn.Module,
    embedding_bias: torch.Tensor | None = None,
    **others,
) -> torch.Tensor:
    """AROUND `LogitsProcessor._compute_lm_head`: return the hidden states, [T, H], if an argmax needs no more."""
    if processor in _bounded:
        return hidden_states
    return original(processor, hidden_states, lm_head, embedding_bias, **others)


def skip_widening(
    original,
    processor: LogitsProcessor,
    logits: torch.Tensor,
    logits_metadata: LogitsMetadata,
    use_buffer: bool = True,
    softcap: float | None = None,
) -> torch.Tensor:
    """AROUND `LogitsProcessor._copy_logits_to_buffer`: cut logits of verified tokens to the vocabulary, without a copy.

    What only an argmax reads is returned unchanged.

    Args:
        logits: [T, padded vocabulary].

    Returns:
        [T, vocabulary]
    """
    if processor not in _targets or not logits_metadata.forward_mode.is_target_verify():
        return original(processor, logits, logits_metadata, use_buffer=use_buffer, softcap=softcap)
    if processor in _for_argmax:
        return logits
    return logits[:, : processor.vocab_size]
