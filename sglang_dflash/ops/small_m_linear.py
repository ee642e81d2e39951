"""The products of a few blocks' rows with weights, by a kernel that reads weights faster than SGLang's.

A cycle of one request spends nine tenths of its time in them, for 16 rows that cost nothing to multiply. Those of a
Qwen3-8B layer on an H100 and its two norms, the activation behind gate_up included, take 158.8 us by cuBLAS and
FlashInfer and 142.8 by `linear_few_rows` and `add_rms_norm`, which begin while the kernel before them ends. With 64
rows it is 163.3 and 155.6, with 128, where only gate_up is ours, 166.3 and 162.5 (scripts/results/cycle_notes.md).
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
from sglang_dflash.ops.reference.linear_few_rows import GATED_COLUMNS, MAX_ROWS, max_rows

logger = logging.getLogger(__name__)

# The smallest product for which it was measured. A thread block has 64 columns: with fewer, part of the GPU is idle.
_MIN_COLUMNS, _MIN_DEPTH = 4096, 4096
# More rows of a gated layer are faster where thread blocks of GATED_COLUMNS occupy so many multiprocessors, each once.
_MIN_OCCUPIED = 0.9
# What activates its gate_up_proj with SiluAndMul and, on an H100, does nothing else to it; on Blackwell SGLang has
# kernels of its own for both together.
_GATED_MLPS = (LlamaMLP, Qwen2MLP)


class FewRowsLinearMethod(UnquantizedLinearMethod):
    """An unquantised layer without bias, of which few rows take another kernel than more do."""

    def __init__(self, max_rows: int, is_gated: bool) -> None:
        """
        Args:
            max_rows: that take it.
            is_gated: few rows come out activated, in half the columns; see :class:`PassActivated`.
        """
        super().__init__()
        self.max_rows, self._is_gated = max_rows, is_gated

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        # torch.compile, of SGLang's prefill, would take one answer for all numbers of rows.
        if torch.compiler.is_compiling() or x.dim() != 2 or not 0 < x.shape[0] <= self.max_rows:
            return super().apply(layer, x, bias)
        return ops.linear_few_rows(x, layer.weight, self._is_gated)


class PassActivated(nn.Module):
    """In place of an MLP's activation, for a gate_up_proj that may have activated its rows."""

    def __init__(self, act_fn: nn.Module, num_columns: int) -> None:
        super().__init__()
        self._act_fn, self._num_columns = act_fn, num_columns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[-1] == self._num_columns else self._act_fn(x)


def may_replace() -> bool:
    """Whether products may be computed otherwise than SGLang does: `--enable-deterministic-inference` and
    `--bf16-gemm-backend` ask for its own."""
    return not must_sum_alike() and get_exec().kernel.bf16_gemm_backend == "auto"


def install(model: nn.Module) -> int:
    """Give every layer of a loaded model that gains by it the kernel for few rows.

    Returns:
        How many layers have it now.
    """
    if not may_replace():
        return 0
    gated = {id(module.gate_up_proj): module for module in model.modules() if type(module) in _GATED_MLPS}
    num_layers, most = 0, 0
    for layer in model.modules():
        if (
            not isinstance(layer, LinearBase)
            or type(layer.quant_method) is not UnquantizedLinearMethod
            or layer.bias is not None
        ):
            continue
        mlp = gated.get(id(layer))
        is_gated = mlp is not None
        num_rows = faster_rows(layer.weight, is_gated)
        if num_rows == 0:
            continue
        layer.quant_method = FewRowsLinearMethod(num_rows, is_gated)
        if is_gated:
            mlp.act_fn = PassActivated(mlp.act_fn, layer.weight.shape[0] // 2)
        num_layers, most = num_layers + 1, max(most, num_rows)
    if num_layers:
        logger.info("%s: %d linear layers have a kernel for up to %d rows.", type(model).__name__, num_layers, most)
    return num_layers


def runs_few_rows(layer: LinearBase, num_rows: int) -> bool:
    """Whether so many rows of a layer take the kernel, which lets the next one begin early."""
    method = layer.quant_method
    return type(method) is FewRowsLinearMethod and num_rows <= method.max_rows


def faster_rows(weight: torch.Tensor, is_gated: bool) -> int:
    """Up to how many rows the kernel was measured to be faster for such a weight, [N, K], or [2 * N, K] where gated."""
    num_columns, depth = weight.shape[0] // (2 if is_gated else 1), weight.shape[1]
    if not is_measured(weight) or num_columns < _MIN_COLUMNS or depth < _MIN_DEPTH:
        return 0
    num_processors = torch.cuda.get_device_properties(weight.device).multi_processor_count
    # Of up to 64 rows cuBLAS is slower for every layer, of more for gated ones of such widths.
    occupies = _MIN_OCCUPIED * num_processors <= num_columns // GATED_COLUMNS <= num_processors
    return max_rows(num_columns, depth, is_gated) if occupies else MAX_ROWS


def must_sum_alike() -> bool:
    """Whether flags ask that a row is summed in the same order whatever the batch."""
    deterministic = get_exec().deterministic
    return deterministic.enable_deterministic_inference or deterministic.rl_on_policy_target is not None


def is_measured(weight: torch.Tensor) -> bool:
    """Whether kernels for such weights were measured on such a GPU at all."""
    return (
        weight.is_cuda
        and torch.cuda.get_device_capability(weight.device) == (9, 0)
        and weight.dtype in (torch.bfloat16, torch.float16)
    )
