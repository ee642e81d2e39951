"""The products of one or two blocks' rows with weights, by a kernel that reads weights faster than SGLang's.

A cycle of one request spends nine tenths of its time in them, for 16 rows that cost nothing to multiply. cuBLAS takes
154.9 us for those of a Qwen3-8B layer on an H100, `kernels.linear_few_rows` 144.5, the activation behind gate_up
included; of 32 rows 153.3 and 145.8 (scripts/results/linear_h100_2026-11-21.md).
"""

from __future__ import annotations

import logging

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.models.llama import LlamaMLP
from sglang.srt.models.qwen2 import Qwen2MLP
from sglang.srt.runtime_context import get_exec
from torch import nn

from sglang_dflash import ops

logger = logging.getLogger(__name__)

# For 64 rows cuBLAS is as fast, for 128 faster.
MAX_ROWS = 32
# The smallest product for which it was measured. A thread block has 64 columns: with fewer, part of the GPU is idle.
_MIN_COLUMNS, _MIN_DEPTH = 4096, 4096
# What activates its gate_up_proj with SiluAndMul and, on an H100, does nothing else to it; on Blackwell SGLang has
# kernels of its own for both together.
_GATED_MLPS = (LlamaMLP, Qwen2MLP)


class FewRowsLinearMethod(UnquantizedLinearMethod):
    """An unquantised layer without bias, of which up to MAX_ROWS rows take another kernel than more do."""

    def __init__(self, is_gated: bool) -> None:
        """
        Args:
            is_gated: few rows come out activated, in half the columns; see :class:`PassActivated`.
        """
        super().__init__()
        self._is_gated = is_gated

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        # torch.compile, of SGLang's prefill, would take one answer for all numbers of rows.
        if torch.compiler.is_compiling() or x.dim() != 2 or not 0 < x.shape[0] <= MAX_ROWS:
            return super().apply(layer, x, bias)
        return ops.linear_few_rows(x, layer.weight, self._is_gated)


class PassActivated(nn.Module):
    """In place of an MLP's activation, for a gate_up_proj that may have activated its rows."""

    def __init__(self, act_fn: nn.Module, num_columns: int) -> None:
        super().__init__()
        self._act_fn, self._num_columns = act_fn, num_columns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[-1] == self._num_columns else self._act_fn(x)


def install(model: nn.Module) -> None:
    """Give every layer of a loaded model that gains by it the kernel for few rows; `--bf16-gemm-backend` may ask for
    another."""
    deterministic = get_exec().deterministic
    if deterministic.enable_deterministic_inference or deterministic.rl_on_policy_target is not None:
        # There a row is summed in the same order whatever the batch.
        return
    if get_exec().kernel.bf16_gemm_backend != "auto":
        return
    gated = {id(module.gate_up_proj): module for module in model.modules() if type(module) in _GATED_MLPS}
    num_layers = 0
    for layer in model.modules():
        if (
            not isinstance(layer, LinearBase)
            or type(layer.quant_method) is not UnquantizedLinearMethod
            or layer.bias is not None
        ):
            continue
        mlp = gated.get(id(layer))
        num_columns = layer.weight.shape[0] // (1 if mlp is None else 2)
        if not is_faster(layer.weight, num_columns):
            continue
        layer.quant_method = FewRowsLinearMethod(is_gated=mlp is not None)
        if mlp is not None:
            mlp.act_fn = PassActivated(mlp.act_fn, num_columns)
        num_layers += 1
    if num_layers:
        logger.info("%s: %d linear layers have a kernel for up to %d rows.", type(model).__name__, num_layers, MAX_ROWS)


def is_faster(weight: torch.Tensor, num_columns: int) -> bool:
    """Whether that was measured for such a weight, [N, K], of whose product `num_columns` are left."""
    return (
        weight.is_cuda
        and torch.cuda.get_device_capability(weight.device) == (9, 0)
        and weight.dtype in (torch.bfloat16, torch.float16)
        and num_columns >= _MIN_COLUMNS
        and weight.shape[1] >= _MIN_DEPTH
    )
