"""Keeps the target's verification logits in the model's dtype.

SGLang widens logits to float32 before sampling. Verification has B rows per request. It takes an argmax, which a copy
cannot change, or draws with a kernel that widens what it has read (`kernels.sample_rows`); `BlockSampler` makes the
copy where it needs one. For a vocabulary of 152k and 32 requests of 16 rows it moves 470 MB per cycle.

Tensor-parallel ranks each choose their tokens, on the same bits and with the same random numbers, which follow from a
seed that all ranks have (`DFlashWorker`), so nothing has to be broadcast. Whatever rounding their forwards differ by, a
column of the logits is computed by one rank only, and the others get a copy (SGLang gathers them in
`LogitsProcessor._get_logits`, before this); the block that it is compared with is one rank's answer as well
(`DraftHead`). Where a difference may matter is in the text: another number of ranks sums in another order.
"""

from __future__ import annotations

import weakref

import torch
from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor
from torch import nn

_targets: weakref.WeakSet[LogitsProcessor] = weakref.WeakSet()


def keep_model_dtype(target_model: nn.Module) -> None:
    """From now on this model's TARGET_VERIFY logits are not widened."""
    for module in target_model.modules():
        # A soft cap is applied after the widening, and needs its precision.
        if isinstance(module, LogitsProcessor) and module.final_logit_softcapping is None:
            _targets.add(module)


def skip_widening(
    original,
    processor: LogitsProcessor,
    logits: torch.Tensor,
    logits_metadata: LogitsMetadata,
    use_buffer: bool = True,
) -> torch.Tensor:
    """AROUND `LogitsProcessor._copy_logits_to_buffer`: [T, padded vocabulary] in, [T, vocabulary] out."""
    if processor not in _targets or not logits_metadata.forward_mode.is_target_verify():
        return original(processor, logits, logits_metadata, use_buffer=use_buffer)
    return logits[:, : processor.vocab_size]
