"""Linear layers with float8 weights: one scale per output column, and products in the dtype of the input.

A GPU quantises the inputs too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from torch import Tensor, nn


def quantize(method: Fp8LinearMethod, layer: nn.Module) -> None:
    """Quantise a loaded layer's weight, [N, K], to float8, [K, N], with scales [1, N]."""
    weight = layer.weight.data.float()
    scales = weight.abs().amax(1).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    rounded = (weight / scales[:, None]).to(torch.float8_e4m3fn)
    for name, tensor in (("weight", rounded.t()), ("weight_scale", scales[None])):
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def apply(method: Fp8LinearMethod, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x, [M, K], times the weight, plus bias, [N]: [M, N]."""
    result = x @ (layer.weight.float() * layer.weight_scale).to(x.dtype)
    return result if bias is None else result + bias


def supported_dtypes(original: Callable, *args: Any, **kwargs: Any) -> list[torch.dtype]:
    """Return the dtypes of inputs, float32 among them."""
    return [*original(*args, **kwargs), torch.float32]
