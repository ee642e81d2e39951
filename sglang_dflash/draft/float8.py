"""Float8 weights of a checkpoint on the way into SGLang's layers.

Attention, MLPs and `fc` keep them, in the layout of SGLang's method. Weights of convolutions, of pairs and of the
drafter's own lm_head are loaded in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.quantization import dequantize
from sglang_dflash.checkpoint.tensors import keeps_float8, quantized_shapes
from sglang_dflash.errors import ConfigError

_WEIGHT_SCALES = ("weight_scale", "weight_scale_inv")


class Float8Weights:
    """Takes the tensors of a checkpoint one by one, in any order, and returns those to load."""

    def __init__(self, config: DFlashConfig) -> None:
        self._config = config
        self._quantized = quantized_shapes(config)
        # Weights and scales whose other half is to come.
        self._halves: dict[str, torch.Tensor] = {}

    def to_load(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield name and tensor of what can be loaded after this tensor of the checkpoint.

        Raises:
            ConfigError: a scale is no scale.
        """
        module, _, kind = name.rpartition(".")
        if module not in self._quantized or kind == "bias":
            yield name, tensor
            return
        if kind != "weight":
            self._check_scale(name, tensor)
        if keeps_float8(module):
            if kind in _WEIGHT_SCALES:
                # SGLang calls scales of blocks so, and no others.
                kind = "weight_scale" if self._config.quantization.block is None else "weight_scale_inv"
            yield f"{module}.{kind}", tensor
        elif kind == "weight" or kind in _WEIGHT_SCALES:
            other = self._halves.pop(module, None)
            if other is None:
                self._halves[module] = tensor
                return
            weight, scale = (tensor, other) if kind == "weight" else (other, tensor)
            yield f"{module}.weight", dequantize(weight, scale, self._config.quantization.block)

    def _check_scale(self, name: str, scale: torch.Tensor) -> None:
        smallest, largest = (bound.item() for bound in torch.aminmax(scale.float()))
        # An input scale divides. A channel without weights may have a scale of 0.
        is_valid = smallest > 0 if name.endswith("input_scale") else smallest >= 0
        if not (is_valid and largest < float("inf")):
            raise ConfigError(
                f"{name} of drafter {self._config.path} has numbers from {smallest} to {largest}: expected scales, "
                "which are positive and finite."
            )


def scales_outputs(name: str, tensor: torch.Tensor) -> bool:
    """Return whether a factor of a layer's outputs belongs into this tensor of it."""
    is_float8 = tensor.dtype == torch.float8_e4m3fn
    return name.endswith((".bias", *_WEIGHT_SCALES)) or (name.endswith(".weight") and not is_float8)
