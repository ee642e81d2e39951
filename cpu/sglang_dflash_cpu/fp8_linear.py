"""Linear layers with float8 weights: scales that broadcast to the weight, and products in the dtype of the input.

A GPU quantises the inputs too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStrategy
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsLinearScheme
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from torch import Tensor, nn


def load(method: Fp8LinearMethod, layer: nn.Module) -> None:
    """Quantise a loaded layer's weight, or take the float8 weight and the scales of blocks of a checkpoint."""
    weight = layer.weight.data
    if method.block_quant:
        rows, columns = method.weight_block_size
        scales = layer.weight_scale_inv.data.repeat_interleave(rows, 0)[: weight.shape[0]]
        _keep(layer, weight, scales.repeat_interleave(columns, 1)[:, : weight.shape[1]])
        return
    assert not method.is_checkpoint_fp8_serialized, "the drafter's are served by compressed-tensors"
    weight = weight.float()
    scales = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    _keep(layer, (weight / scales).to(torch.float8_e4m3fn), scales)


def apply(method: Fp8LinearMethod, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x, [M, K], times the weight, plus bias, [N]: [M, N]."""
    return _multiply(layer, x, bias)


def load_compressed(scheme: CompressedTensorsLinearScheme, layer: nn.Module) -> None:
    """Take the float8 weight and the scales of a checkpoint, which has one scale per tensor or per output."""
    scales = layer.weight_scale.data
    if scheme.strategy == QuantizationStrategy.TENSOR:
        # One for each layer that is fused into this one.
        scales = scales.repeat_interleave(torch.tensor(layer.logical_widths))[:, None]
    _keep(layer, layer.weight.data, scales)


def apply_compressed(
    scheme: CompressedTensorsLinearScheme, layer: nn.Module, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return x, [M, K], times the weight, plus bias, [N]: [M, N]."""
    return _multiply(layer, x, bias)


def supported_dtypes(original: Callable, *args: Any, **kwargs: Any) -> list[torch.dtype]:
    """Return the dtypes of inputs, float32 among them."""
    return [*original(*args, **kwargs), torch.float32]


def is_supported(config: CompressedTensorsConfig, min_capability: int, error: bool = True) -> bool:
    """Return True: there is no GPU whose compute capability a scheme could ask for."""
    return True


def _keep(layer: nn.Module, weight: Tensor, scales: Tensor) -> None:
    """Register a weight, [N, K] float8, as [K, N], with scales that broadcast to it."""
    for name, tensor in (("weight", weight), ("weight_scale", scales)):
        layer.register_parameter(name, nn.Parameter(tensor.t(), requires_grad=False))


def _multiply(layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    result = x @ (layer.weight.float() * layer.weight_scale).to(x.dtype)
    return result if bias is None else result + bias
