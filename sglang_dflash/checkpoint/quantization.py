"""Float8 weights of a DFlash checkpoint: `quantization_config`, the layers that it covers, and their scales.

Formats:
    compressed-tensors (https://github.com/vllm-project/compressed-tensors): `config_groups` with a scheme and its
        `targets`, and `ignore`. Scales per tensor, per output channel or per block.
    fp8: `activation_scheme` and `modules_to_not_convert`. Scales per tensor, or per block with `weight_block_size`.

Shapes: N outputs and K inputs of a linear layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_dflash.errors import ConfigError

# What has one scale.
TENSOR, CHANNEL, BLOCK = "tensor", "channel", "block"
# How inputs are quantised: by a scale of the checkpoint, or by their own largest value.
STATIC, DYNAMIC = "static", "dynamic"
# The dtype of the weights.
DTYPE = "float8_e4m3fn"
# The target of `config_groups` that stands for every linear layer.
_ALL = "Linear"
_FORMATS = ("float-quantized", "naive-quantized")


@dataclass(frozen=True)
class Quantization:
    """Float8 weights of a drafter's linear layers.

    Attributes:
        method: "compressed-tensors" or "fp8".
        scales: TENSOR, CHANNEL or BLOCK.
        block: rows and columns of a block; None: scales are per tensor or channel.
        inputs: STATIC or DYNAMIC; None: inputs are not quantised.
        targets: names or patterns of quantised layers, or `Linear`.
        ignored: names or patterns of layers that are not quantised.
    """

    method: str
    scales: str
    block: tuple[int, int] | None
    inputs: str | None
    targets: tuple[str, ...]
    ignored: tuple[str, ...]

    def __str__(self) -> str:
        per = f"block of {self.block[0]} x {self.block[1]}" if self.block else self.scales
        return f"{self.method}, {DTYPE} with a scale per {per}, {self.inputs or 'no'} quantisation of inputs"

    def covers(self, module: str) -> bool:
        """Return whether a linear layer is quantised, by its name in z-lab's spelling."""
        return self._is_named(module, self.targets) and not self._is_named(module, self.ignored)

    def scale_shapes(self, module: str, weight: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        """Return name and shape of the scales of a quantised layer.

        Args:
            module: name of the layer.
            weight: shape of its weight, (N, K).
        """
        shape: tuple[int, ...] = (1,)
        if self.scales == CHANNEL:
            shape = (weight[0], 1)
        elif self.block is not None:
            shape = (math.ceil(weight[0] / self.block[0]), math.ceil(weight[1] / self.block[1]))
        is_inverse = self.method == "fp8" and self.scales == BLOCK
        found = {f"{module}.weight_scale_inv" if is_inverse else f"{module}.weight_scale": shape}
        if self.inputs == STATIC:
            found[f"{module}.input_scale"] = (1,)
        return found

    def to_sglang(self, modules: Iterable[str]) -> dict[str, Any]:
        """Return the `quantization_config` that SGLang reads. It names layers one by one.

        SGLang has two methods. Its `fp8` serves blocks on every GPU, and its compressed-tensors serves the rest.

        Args:
            modules: every linear layer of the drafter.
        """
        plain = [module for module in modules if not self.covers(module)]
        if self.block is not None:
            return {
                "quant_method": "fp8",
                "activation_scheme": DYNAMIC,
                "weight_block_size": list(self.block),
                "ignored_layers": plain,
            }
        number = {"num_bits": 8, "type": "float", "symmetric": True}
        inputs = None
        if self.inputs is not None:
            is_static = self.inputs == STATIC
            inputs = number | {"dynamic": not is_static, "strategy": TENSOR if is_static else "token"}
        weights = number | {"dynamic": False, "strategy": self.scales}
        return {
            "quant_method": "compressed-tensors",
            "format": _FORMATS[0],
            "ignore": plain,
            "config_groups": {"group_0": {"targets": [_ALL], "weights": weights, "input_activations": inputs}},
        }

    def _is_named(self, module: str, names: tuple[str, ...]) -> bool:
        return any(name == _ALL or self._matches(f"model.{module}", name) for name in names)

    def _matches(self, module: str, name: str) -> bool:
        if name.startswith("re:"):
            return any(re.match(name[3:], spelling) for spelling in (module, module.removeprefix("model.")))
        # In compressed-tensors a parent's name does not stand for its layers. In fp8 it does.
        return f".{module}".endswith(f".{name}") or (self.method == "fp8" and f".{name}." in f".{module}.")


def dequantize(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """Return a weight in float32.

    Args:
        weight: [N, K] float8.
        scale: [1], [N, 1], or [ceil(N / rows), ceil(K / columns)] with blocks.
        block: rows and columns of a block; None: there are none.
    """
    scale = scale.float()
    if block is not None:
        scale = scale.repeat_interleave(block[0], 0)[: weight.shape[0]]
        scale = scale.repeat_interleave(block[1], 1)[:, : weight.shape[1]]
    return weight.float() * scale


def read_quantization(fields: object, path: str) -> Quantization | None:
    """Return what a `quantization_config` means; None: there is none.

    Args:
        fields: the object in `config.json`.
        path: of the checkpoint, for messages.

    Raises:
        ConfigError: names the first field that is not served, and its value.
    """
    if not fields:
        return None
    read = _Reader(fields, path)
    method = read.one_of("quant_method", "compressed-tensors", "fp8")
    for name in ("kv_cache_scheme", "kv_cache_quant_algo", "sparsity_config", "transform_config", "scale_fmt"):
        if read.fields.get(name):
            raise read.error(name, read.fields[name], "nothing")
    return _read_fp8(read) if method == "fp8" else _read_compressed_tensors(read)


def _read_fp8(read: _Reader) -> Quantization:
    read.one_of("fmt", "e4m3", None)
    inputs = read.one_of("activation_scheme", DYNAMIC, STATIC)
    block = read.block("weight_block_size")
    if block is not None and inputs != DYNAMIC:
        raise read.error("activation_scheme", inputs, f"{DYNAMIC!r} with weight_block_size")
    ignored = read.names("modules_to_not_convert") + read.names("ignored_layers")
    return Quantization("fp8", TENSOR if block is None else BLOCK, block, inputs, (_ALL,), ignored)


def _read_compressed_tensors(read: _Reader) -> Quantization:
    read.one_of("format", *_FORMATS)
    groups = read.fields.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise read.error("config_groups", groups, "an object with a scheme")
    schemes, targets = set(), ()
    for name, group in groups.items():
        group = _Reader(group, read.path, f"{read.where}.config_groups.{name}")
        group.one_of("format", *_FORMATS, None)
        group.one_of("output_activations", None)
        schemes.add(_scheme(group))
        targets += group.names("targets")
    if len(schemes) > 1:
        raise read.error("config_groups", sorted(groups), "one scheme for all quantised layers")
    [(scales, block, inputs)] = schemes
    return Quantization("compressed-tensors", scales, block, inputs, targets, read.names("ignore"))


def _scheme(group: _Reader) -> tuple[str, tuple[int, int] | None, str | None]:
    weights = _Reader(group.fields.get("weights"), group.path, f"{group.where}.weights")
    weights.float8(dynamic=(False, None))
    scales = weights.one_of("strategy", TENSOR, CHANNEL, BLOCK)
    block = weights.block("block_structure") if scales == BLOCK else None
    if scales == BLOCK and block is None:
        raise weights.error("block_structure", None, "two sizes, as strategy is 'block'")
    if group.fields.get("input_activations") is None:
        if block is not None:
            raise group.error("input_activations", None, "dynamic quantisation, as the weights have blocks")
        return scales, block, None
    inputs = _Reader(group.fields["input_activations"], group.path, f"{group.where}.input_activations")
    is_dynamic = inputs.float8(dynamic=(True, False, None))
    if block is not None:
        inputs.one_of("dynamic", True)
        inputs.one_of("strategy", "group")
        inputs.one_of("group_size", block[1])
    else:
        inputs.one_of("strategy", TENSOR, *(["token"] if is_dynamic else []))
    return scales, block, DYNAMIC if is_dynamic else STATIC


class _Reader:
    """Fields of an object in `config.json`, and messages that name them.

    Attributes:
        where: name of the object.
    """

    def __init__(self, fields: object, path: str, where: str = "quantization_config") -> None:
        self.path, self.where = path, where
        if not isinstance(fields, dict):
            raise ConfigError(f"{where}={fields!r} in config.json of drafter {path}: expected an object.")
        self.fields = fields

    def error(self, field: str, value: object, expected: str) -> ConfigError:
        return ConfigError(
            f"{self.where}.{field}={value!r} in config.json of drafter {self.path}: expected {expected}."
        )

    def one_of(self, field: str, *known: object) -> Any:
        value = self.fields.get(field)
        # 1 equals True, but is not a bool.
        if not any(type(value) is type(each) and value == each for each in known):
            raise self.error(field, value, " or ".join("nothing" if each is None else repr(each) for each in known))
        return value

    def float8(self, dynamic: tuple[object, ...]) -> bool:
        """Check the fields of a float8 format. Return whether its scales are computed while serving."""
        self.one_of("num_bits", 8)
        self.one_of("type", "float")
        self.one_of("symmetric", True, None)
        return bool(self.one_of("dynamic", *dynamic))

    def block(self, field: str) -> tuple[int, int] | None:
        value = self.fields.get(field)
        if value is None:
            return None
        is_pair = isinstance(value, list) and len(value) == 2 and all(type(size) is int for size in value)
        # SGLang's kernels have tiles of these sizes.
        if not is_pair or not all(16 <= size <= 256 and size.bit_count() == 1 for size in value):
            raise self.error(field, value, "two powers of two from 16 to 256")
        return value[0], value[1]

    def names(self, field: str) -> tuple[str, ...]:
        value = self.fields.get(field)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.error(field, value, "a list of names")
        for name in value:
            try:
                re.compile(name[3:] if name.startswith("re:") else "")
            except re.error as error:
                raise self.error(field, name, f"a regular expression after 're:' ({error})") from error
        return tuple(value)
