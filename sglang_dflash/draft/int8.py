"""Linear layers of the drafter with few rows, by an int8 copy of their weights.

A cycle of few requests is bound by reading weights, and the copy has half the bytes. Its products are exact up to the
rounding of the weights (`ops.linear_int8`). Drafts rarely differ, and the target decides what is committed.

`fc` keeps its own weights. With int8 weights of `fc` too, three times as many drafts of the SmolLM2 pair change.
"""

from __future__ import annotations

import logging

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.utils import log_info_on_rank0
from torch import nn

from sglang_dflash import ops
from sglang_dflash.ops.reference.linear_int8 import DEPTH, max_rows, quantize_columns
from sglang_dflash.ops.small_m_linear import FewRowsLinearMethod
from sglang_dflash.ops.weight_copy import WeightCopy
from sglang_dflash.server_args.arguments import runs_cycles

logger = logging.getLogger(__name__)


class Int8LinearMethod(FewRowsLinearMethod):
    """Method of a layer whose few rows read an int8 copy. Others take the method that the layer had."""

    def __init__(self, few_rows: FewRowsLinearMethod, weight: torch.Tensor) -> None:
        """
        Args:
            few_rows: the method that the layer has.
            weight: [columns, depth] of the layer.
        """
        super().__init__(few_rows.max_rows, few_rows.is_gated)
        self._copied_rows = max_rows(few_rows.is_gated)
        self._copy = WeightCopy(weight, quantize_columns)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if torch.compiler.is_compiling() or x.dim() != 2 or not 0 < x.shape[0] <= self._copied_rows:
            return super().apply(layer, x, bias)
        return ops.linear_int8(x, *self._copy.tensors, self.is_gated)


def install(layers: nn.Module) -> None:
    """Install copies in every linear layer that uses the kernel for few rows, after `small_m_linear.install`.

    A server that only prefills gets none.

    Args:
        layers: the drafter's decoder layers.
    """
    num_layers, num_bytes = 0, 0
    for layer in layers.modules() if runs_cycles() else ():
        if not isinstance(layer, LinearBase) or type(layer.quant_method) is not FewRowsLinearMethod:
            continue
        weight = layer.weight.data
        if weight.shape[1] % DEPTH == 0:
            layer.quant_method = Int8LinearMethod(layer.quant_method, weight)
            num_layers += 1
            num_bytes += weight.numel()
    if num_layers:
        log_info_on_rank0(
            logger,
            f"{num_layers} linear layers of the drafter read int8 copies of their weights for few rows, "
            f"{num_bytes >> 20} MiB of each GPU.",
        )
