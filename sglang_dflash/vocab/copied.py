"""Weights of lm_heads that gain by a copy in fewer bits."""

from __future__ import annotations

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sglang_dflash.ops import small_m_linear
from sglang_dflash.vocab.shard import vocab_parts

# Smallest lm_head that gets a copy. A smaller one is read so fast that kernel launches dominate.
_MIN_NUMBERS = 1 << 28


def copied_weight(lm_head: VocabParallelEmbedding, depth: int) -> torch.Tensor | None:
    """Return the weight of this rank's shard without padding, [V, H]; None if a copy of it would not be faster.

    A copy of a small or quantised lm_head is not. There is none either if SGLang's flags ask for a certain kernel
    (`small_m_linear.may_replace`).

    Args:
        depth: H must be a multiple of it.
    """
    if not small_m_linear.may_replace():
        return None
    parts = vocab_parts(lm_head)
    if type(lm_head.quant_method) is not UnquantizedEmbeddingMethod or len(parts) != 1:
        return None
    first, num_columns, _ = parts[0]
    weight = lm_head.weight.data[first : first + num_columns]
    # The padded size decides, so that the last rank, which may have fewer tokens, decides as the others do.
    is_large = lm_head.weight.numel() >= _MIN_NUMBERS
    if not small_m_linear.is_measured(weight) or not is_large or weight.shape[1] % depth:
        return None
    return weight
