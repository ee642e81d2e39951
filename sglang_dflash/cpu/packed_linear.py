"""The products of a verified block's rows with weights, on a CPU.

A plain step reads every weight once, and so should a cycle, whose few rows cost little to multiply. MKL, which has
weights as they are, first copies them into an order of its own: for 4 rows it takes 2.4 times as long as for one, where
oneDNN takes 1.3 times with weights that were put in order before (SmolLM2-135M on one core of an EPYC). One row is as
fast either way, and many rows gain nothing.
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
# Below, a product takes no longer than what surrounds it.
_MIN_NUMBERS = 1 << 18
# The rows for which oneDNN chooses its order.
_TYPICAL_ROWS = 16

_packed: weakref.WeakSet[_Packed] = weakref.WeakSet()


class _Packed:
    """A layer's weights a second time, in oneDNN's order, as soon as they are needed."""

    def __init__(self) -> None:
        self._weight: torch.Tensor | None = None
        _packed.add(self)

    def forget(self) -> None:
        self._weight = None

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [M, K], weight [N, K] and bias [N] float32: [M, N]."""
        if self._weight is None:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_ROWS)
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, "none", [], "")


class _PackedMethod:
    """Before a method of SGLang's among the bases of a class: what that does with few rows, by packed weights."""

    def __init__(self) -> None:
        super().__init__()
        self._packed = _Packed()

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.dim() == 2 and MIN_ROWS <= x.shape[0] <= MAX_ROWS:
            return self._packed.multiply(x, layer.weight, bias)
        return super().apply(layer, x, bias)


class PackedLinearMethod(_PackedMethod, UnquantizedLinearMethod):
    """Of a linear layer."""


class PackedEmbeddingMethod(_PackedMethod, UnquantizedEmbeddingMethod):
    """Of an lm_head, tied to the embedding or not."""


def install(model: nn.Module) -> None:
    """Give every layer of a loaded model that gains by it weights in oneDNN's order, beside those that it has."""
    if get_exec().deterministic.enable_deterministic_inference:
        # There a row is summed in the same order whatever the batch.
        return
    num_layers = 0
    for layer in model.modules():
        method = _method(layer)
        if method is not None:
            layer.quant_method = method
            num_layers += 1
    if num_layers:
        logger.info(
            "%s: %d layers have their weights twice, for %d to %d rows in oneDNN's order.",
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
    """Weights may have changed: those of this process are put in order again when they are needed."""
    for packed in _packed:
        packed.forget()
