"""Linear layers for the few tokens of verified blocks, on a CPU.

A decode step without speculation reads every weight once. A cycle should do the same, as a few more tokens cost little
arithmetic. MKL copies the weights into its own layout in every call: 4 tokens take 2.4 times as long as one. oneDNN
with weights that are packed once takes 1.3 times as long (SmolLM2-135M on one core of an EPYC). One token is as fast
with both, and many tokens gain nothing.
"""

from __future__ import annotations

import logging
import weakref

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.runtime_context import get_exec
from torch import nn

logger = logging.getLogger(__name__)

MIN_ROWS, MAX_ROWS = 2, 64
# Smaller layers are not worth it: their product takes no longer than the call.
_MIN_NUMBERS = 1 << 18
# Number of tokens for which oneDNN chooses its layout.
_TYPICAL_ROWS = 16

_packed: weakref.WeakSet[_Packed] = weakref.WeakSet()


class _Packed:
    """A copy of a layer's weights in oneDNN's layout, made when it is first needed."""

    def __init__(self) -> None:
        self._weight: torch.Tensor | None = None
        _packed.add(self)

    def forget(self) -> None:
        self._weight = None

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the float32 product, [M, N], of x, [M, K], and weight, [N, K], plus bias, [N]."""
        if self._weight is None:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_ROWS)
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, "none", [], "")


class _PackedMethod:
    """Mixin for a linear method of SGLang: multiplies a few tokens with packed weights."""

    def __init__(self) -> None:
        super().__init__()
        self._packed = _Packed()

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.dim() == 2 and MIN_ROWS <= x.shape[0] <= MAX_ROWS:
            return self._packed.multiply(x, layer.weight, bias)
        return super().apply(layer, x, bias)


class PackedLinearMethod(_PackedMethod, UnquantizedLinearMethod):
    """Method of a linear layer."""


class PackedEmbeddingMethod(_PackedMethod, UnquantizedEmbeddingMethod):
    """Method of an lm_head, tied to the embedding or not."""


def install(model: nn.Module) -> None:
    """Replace the methods of all float32 layers of a loaded model that are large enough."""
    if get_exec().deterministic.enable_deterministic_inference:
        # A token's product must be summed in the same order for every batch size.
        return
    num_layers = 0
    for layer in model.modules():
        method = _method(layer)
        if method is not None:
            layer.quant_method = method
            num_layers += 1
    if num_layers:
        logger.info(
            "%s: %d layers keep a second copy of their weights, in oneDNN's layout, for %d to %d tokens.",
            type(model).__name__,
            num_layers,
            MIN_ROWS,
            MAX_ROWS,
        )


def _method(layer: nn.Module) -> PackedLinearMethod | PackedEmbeddingMethod | None:
    if not isinstance(layer, LinearBase | VocabParallelEmbedding):
        return None
    methods = {UnquantizedLinearMethod: PackedLinearMethod, UnquantizedEmbeddingMethod: PackedEmbeddingMethod}
    method = methods.get(type(layer.quant_method))
    if method is None or layer.weight.dtype != torch.float32 or layer.weight.numel() < _MIN_NUMBERS:
        return None
    return method()


def forget_weights() -> None:
    """Drop all packed weights of this process. They are packed again when they are next needed."""
    for packed in _packed:
        packed.forget()
