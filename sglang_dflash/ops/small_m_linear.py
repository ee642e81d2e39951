"""Linear layers of few rows, by a kernel that reads weights faster than SGLang's.

A cycle of one request spends nine tenths of its time in linear layers. With 16 rows they are bound by reading weights.
The figures are microseconds for the linear layers, the two norms and the activation of one Qwen3-8B layer on an H100
(scripts/results/cycle_notes.md). Ours are `linear_few_rows` and `add_rms_norm`, which start while the kernel before
ends.

    rows    cuBLAS and FlashInfer    ours
      16                    158.8   142.8
      64                    163.3   155.6
     128                    166.3   162.5    only gate_up is ours
"""

from __future__ import annotations

import logging

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.lora.layers import BaseLayerWithLoRA
from sglang.srt.models.llama import LlamaMLP
from sglang.srt.models.qwen2 import Qwen2MLP
from sglang.srt.runtime_context import get_exec
from torch import nn

from sglang_dflash import ops
from sglang_dflash.ops.reference.linear_few_rows import GATED_COLUMNS, MAX_ROWS, max_rows

logger = logging.getLogger(__name__)

# The smallest layer that was measured. A thread block has 64 columns; fewer columns leave part of the GPU idle.
_MIN_COLUMNS, _MIN_DEPTH = 4096, 4096
# More than MAX_ROWS rows of a gated layer are faster if its thread blocks of GATED_COLUMNS columns occupy at least this
# share of the multiprocessors, each at most once.
_MIN_OCCUPIED = 0.9
# MLPs that activate gate_up_proj's result with SiluAndMul and, on an H100, do nothing else to it. On Blackwell SGLang
# fuses both.
_GATED_MLPS = (LlamaMLP, Qwen2MLP)


class FewRowsLinearMethod(UnquantizedLinearMethod):
    """Method of an unquantised layer without bias. Inputs of few rows take the kernel, others take SGLang's method."""

    def __init__(self, max_rows: int, is_gated: bool) -> None:
        """
        Args:
            max_rows: most rows that take the kernel.
            is_gated: few rows are returned activated, in half the columns; see :class:`PassActivated`.
        """
        super().__init__()
        self.max_rows, self.is_gated = max_rows, is_gated

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        # torch.compile, which SGLang's prefill may use, would fix this choice for every number of rows.
        if torch.compiler.is_compiling() or x.dim() != 2 or not 0 < x.shape[0] <= self.max_rows:
            return super().apply(layer, x, bias)
        return ops.linear_few_rows(x, layer.weight, self.is_gated)


class PassActivated(nn.Module):
    """Activation of an MLP whose gate_up_proj may have activated its rows already."""

    def __init__(self, act_fn: nn.Module, num_columns: int) -> None:
        super().__init__()
        self._act_fn, self._num_columns = act_fn, num_columns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[-1] == self._num_columns else self._act_fn(x)


def may_replace() -> bool:
    """Return whether linear layers may use other kernels than SGLang's.

    `--enable-deterministic-inference` and `--bf16-gemm-backend` require SGLang's.
    """
    return not must_be_batch_invariant() and get_exec().kernel.bf16_gemm_backend == "auto"


def install(model: nn.Module) -> int:
    """Install the kernel for few rows in every layer of a loaded model that gains by it.

    Returns:
        The number of those layers.
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
        logger.info("%s: %d linear layers use the kernel for up to %d rows.", type(model).__name__, num_layers, most)
    return num_layers


def runs_few_rows(layer: LinearBase | BaseLayerWithLoRA, num_rows: int) -> bool:
    """Return whether the layer uses the kernel for this number of rows. The kernel lets the next one start early.

    After a layer with LoRA adapters, the next kernel follows those of the adapters.
    """
    if isinstance(layer, BaseLayerWithLoRA):
        return False
    method = layer.quant_method
    return isinstance(method, FewRowsLinearMethod) and num_rows <= method.max_rows


def faster_rows(weight: torch.Tensor, is_gated: bool) -> int:
    """Return the number of rows up to which the kernel is faster for a weight; 0 if it never is.

    Args:
        weight: [columns, depth], or [2 * columns, depth] if gated.
        is_gated: as in `linear_few_rows`.
    """
    num_columns, depth = weight.shape[0] // (2 if is_gated else 1), weight.shape[1]
    if not is_measured(weight) or num_columns < _MIN_COLUMNS or depth < _MIN_DEPTH:
        return 0
    num_processors = torch.cuda.get_device_properties(weight.device).multi_processor_count
    # Up to 64 rows the kernel beats cuBLAS for every layer. For more rows it does for gated layers of fitting widths.
    occupies = _MIN_OCCUPIED * num_processors <= num_columns // GATED_COLUMNS <= num_processors
    return max_rows(num_columns, depth, is_gated) if occupies else MAX_ROWS


def must_be_batch_invariant() -> bool:
    """Return whether flags require that a row is summed in the same order in every batch."""
    deterministic = get_exec().deterministic
    return deterministic.enable_deterministic_inference or deterministic.rl_on_policy_target is not None


def is_measured(weight: torch.Tensor) -> bool:
    """Return whether the kernels were measured on this GPU and for this dtype."""
    return (
        weight.is_cuda
        and torch.cuda.get_device_capability(weight.device) == (9, 0)
        and weight.dtype in (torch.bfloat16, torch.float16)
    )
