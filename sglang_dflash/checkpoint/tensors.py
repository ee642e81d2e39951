"""Tensors of a DFlash checkpoint: required ones, optional ones, and a check of those that are there.

Shapes: H hidden size, D head dimension, V the target's vocabulary, v the drafter's own if it has one, r rank of pairs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import get_safetensors_metadata
from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, OfflineModeIsEnabled
from safetensors import SafetensorError, safe_open

from sglang_dflash.checkpoint import quantization
from sglang_dflash.checkpoint.config import DEEPSPEC, GATED, SELECTOR, ZLAB, DFlashConfig, Pairs
from sglang_dflash.errors import ConfigError

Shape = tuple[int, ...]

_WEIGHTS = ("float64", "float32", "float16", "bfloat16")
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
# Names of dtypes in headers of safetensors files. Others keep their names.
_HEADER_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"}
_HEADER_DTYPES |= {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8"}
_HEADER_DTYPES["F8_E4M3"] = quantization.DTYPE


# Ends of the names under which SGLang's modules have some tensors without `.weight`. z-lab publishes them so, and its
# library writes them with it.
_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
# Layers that SGLang multiplies by as one.
_FUSED = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
# Names in the checkpoint of Muse's drafter.
_MUSE_NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


class Tensor(NamedTuple):
    """A tensor in the header of a checkpoint.

    Attributes:
        name: str. Its name in the checkpoint.
        shape: tuple of int.
        dtype: str. torch's name of the dtype, without `torch.`.
    """

    name: str
    shape: Shape
    dtype: str


def checkpoint_name(name: str) -> str:
    """Return a tensor's name as z-lab spells it, without `model.`, which some checkpoints put before it."""
    name = name.removeprefix("model.")
    name = _MUSE_NAMES.get(name, name)
    plain = name.removesuffix(".weight")
    return plain if plain in _CODEBOOKS else name


def expected_tensors(config: DFlashConfig) -> dict[str, Shape]:
    """Return name and shape of every tensor that a checkpoint with this config must have."""
    expected = _weights(config)
    for module, shape in quantized_shapes(config).items():
        expected |= config.quantization.scale_shapes(module, shape)
    return expected


def quantized_shapes(config: DFlashConfig) -> dict[str, Shape]:
    """Return the linear layers with float8 weights, and the shapes of these."""
    if config.quantization is None:
        return {}
    return {name: shape for name, shape in linear_shapes(config).items() if config.quantization.covers(name)}


def linear_shapes(config: DFlashConfig) -> dict[str, Shape]:
    """Return every linear layer of a checkpoint and the shape of its weight."""
    # The other matrices are tables with a row for every token.
    tables = ("markov_head.markov_w1", *_CODEBOOKS)
    weights = {name.removesuffix(".weight"): shape for name, shape in _weights(config).items()}
    return {name: shape for name, shape in weights.items() if len(shape) == 2 and name not in tables}


def _weights(config: DFlashConfig) -> dict[str, Shape]:
    hidden, head = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_attention_heads * head, config.num_key_value_heads * head
    expected = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(len(config.layers)):
        layer = {
            "self_attn.q_proj.weight": (q_size, hidden),
            "self_attn.k_proj.weight": (kv_size, hidden),
            "self_attn.v_proj.weight": (kv_size, hidden),
            "self_attn.o_proj.weight": (hidden, q_size),
            "self_attn.q_norm.weight": (head,),
            "self_attn.k_norm.weight": (head,),
            "mlp.gate_proj.weight": (config.intermediate_size, hidden),
            "mlp.up_proj.weight": (config.intermediate_size, hidden),
            "mlp.down_proj.weight": (hidden, config.intermediate_size),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        if config.attention_bias:
            sizes = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size), ("o_proj", hidden))
            layer |= {f"self_attn.{proj}.bias": (size,) for proj, size in sizes}
        expected |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if config.draft_vocab_size is not None:
        expected |= {"lm_head.weight": (config.draft_vocab_size, hidden), "d2t": (config.draft_vocab_size,)}
    for part in part_tensors(config).values():
        expected |= part
    return expected


def part_tensors(config: DFlashConfig) -> dict[str, dict[str, Shape]]:
    """Return name and shape of the tensors of each optional part that the drafter has, by the name of the part."""
    parts = {}
    if config.conv is not None:
        taps, hidden = config.conv.taps, config.hidden_size
        weights = {
            # Side (input, output), tap, channel.
            "base_kernel": (2, taps, hidden),
            "kernel_projection.weight": (2 * taps * hidden // config.conv.group_size, hidden),
        }
        parts["convolutions"] = {
            f"layers.{i}.{conv}.{name}": shape
            for i in range(len(config.layers))
            for conv in ("attention_conv", "mlp_conv")
            for name, shape in weights.items()
        }
    if config.pairs is not None:
        parts["pairs"] = _pair_tensors(config.pairs, config)
    return parts


def _pair_tensors(pairs: Pairs, config: DFlashConfig) -> dict[str, Shape]:
    codebook = (config.vocab_size, pairs.rank)
    if pairs.kind == SELECTOR:
        projection = {"candidate_selector.hidden_projection.weight": (pairs.rank, config.hidden_size)}
        return dict.fromkeys(_CODEBOOKS, codebook) | projection
    tensors = {"markov_head.markov_w1.weight": codebook, "markov_head.markov_w2.weight": codebook}
    if pairs.kind == GATED:
        tensors["markov_head.gate_proj.weight"] = (pairs.rank, config.hidden_size + pairs.rank)
        tensors["markov_head.gate_proj.bias"] = (pairs.rank,)
    return tensors


def spare_tensors(config: DFlashConfig) -> dict[str, Shape]:
    """Return name and shape of the tensors that a checkpoint may have and that are not loaded.

    speculators and DeepSpec checkpoints may have frozen copies of the target's embedding, lm_head and norm. Their own
    libraries take them from the target, too. A confidence head predicts acceptance, which this package measures.
    """
    if config.format == ZLAB:
        return {}
    spare = {"embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    if config.confidence_inputs:
        spare |= {"confidence_head.proj.weight": (1, config.confidence_inputs), "confidence_head.proj.bias": (1,)}
    if config.format == DEEPSPEC:
        return spare | {"lm_head.weight": (config.vocab_size, config.hidden_size)}
    head = (config.draft_vocab_size or config.vocab_size, config.hidden_size)
    spare |= {
        "verifier_lm_head.weight": head,
        "verifier_norm.weight": (config.hidden_size,),
        "t2d": (config.vocab_size,),
    }
    if config.draft_vocab_size is None:
        spare |= {"lm_head.weight": head, "d2t": (config.vocab_size,)}
    return spare


def tensor_problems(config: DFlashConfig, found: Iterable[Tensor]) -> list[str]:
    """Return a phrase for every unexpected, wrongly shaped, quantised, repeated or missing tensor of a checkpoint."""
    expected, spare = expected_tensors(config), spare_tensors(config)
    quantized = quantized_shapes(config)
    problems, seen = [], {}
    for tensor in found:
        name = checkpoint_name(tensor.name)
        want = (spare | expected).get(name)
        dtypes = _dtypes(name, quantized) if name in expected or name == "t2d" else (tensor.dtype,)
        if name in seen:
            problems.append(f"{name} is there twice, as {seen[name]} and as {tensor.name}")
        elif want is None:
            problems.append(f"unexpected {tensor.name} {list(tensor.shape)}")
        # A scale may be a scalar.
        elif (tensor.shape or (1,)) != want:
            problems.append(f"{tensor.name} has shape {list(tensor.shape)}, expected {list(want)}")
        elif tensor.dtype not in dtypes:
            problems.append(f"{tensor.name} is in {tensor.dtype}, expected one of {', '.join(dtypes)}")
        seen[name] = tensor.name
    return problems + [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in seen]


def check_tensors(config: DFlashConfig, found: Iterable[Tensor]) -> None:
    """Raise :class:`ConfigError` naming every tensor that is wrong."""
    problems = tensor_problems(config, found)
    if problems:
        raise ConfigError(f"drafter {config.path} does not load: " + "; ".join(problems) + ".")


def check_quantized_layers(config: DFlashConfig, tp_size: int) -> None:
    """Check that SGLang can fuse the layers with float8 weights, and divide their blocks over `tp_size` ranks.

    Raises:
        ConfigError: names the first layers that do not fit.
    """
    shapes = quantized_shapes(config)
    if not shapes:
        return
    for i in range(len(config.layers)):
        for fused in _FUSED:
            names = [f"layers.{i}.{name}" for name in fused]
            if len({name in shapes for name in names}) > 1:
                raise ConfigError(
                    f"quantization_config of drafter {config.path} covers some of {', '.join(names)}: expected all or "
                    "none, as SGLang multiplies by them as one matrix."
                )
    block = config.quantization.block
    if block is None:
        return
    for name, (outputs, inputs) in shapes.items():
        if not _has_whole_blocks(name, outputs, inputs, block, config, tp_size):
            raise ConfigError(
                f"{name} of drafter {config.path} has a weight of {outputs} x {inputs} in blocks of {block[0]} x "
                f"{block[1]}, which do not divide over --tp-size {tp_size}."
            )


def _has_whole_blocks(
    name: str, outputs: int, inputs: int, block: tuple[int, int], config: DFlashConfig, tp_size: int
) -> bool:
    if not keeps_float8(name):
        return True
    if name.endswith(("o_proj", "down_proj", "fc")):
        return tp_size == 1 or inputs // tp_size % block[1] == 0
    # Fewer KV heads than ranks are replicated.
    per_rank = outputs // tp_size
    return (max(per_rank, config.head_dim) if "self_attn" in name else per_rank) % block[0] == 0


def weight_bytes(config: DFlashConfig, itemsize: int) -> int:
    """Return the bytes of all weights as they are loaded, if those that are not float8 have `itemsize`."""
    quantized = quantized_shapes(config)
    total = 0
    for name, shape in expected_tensors(config).items():
        module, _, kind = name.rpartition(".")
        if module not in quantized or kind == "bias":
            size = itemsize
        elif keeps_float8(module):
            # Scales are float32.
            size = 1 if kind == "weight" else 4
        else:
            size = itemsize if kind == "weight" else 0
        total += math.prod(shape) * size
    return total


def keeps_float8(module: str) -> bool:
    """Return whether a linear layer computes with the float8 weights of the checkpoint.

    The others are small, or not SGLang's. Their weights are loaded in the model's dtype.
    """
    return module == "fc" or ".self_attn." in module or ".mlp." in module


def _dtypes(name: str, quantized: Iterable[str]) -> tuple[str, ...]:
    """Return the dtypes that a loaded tensor may have."""
    if name.endswith(".weight") and name.removesuffix(".weight") in quantized:
        return (quantization.DTYPE,)
    return {"d2t": _INTEGERS, "t2d": ("bool", *_INTEGERS)}.get(name, _WEIGHTS)


def safetensors_files(folder: str) -> list[Path]:
    """Return the files of a checkpoint that SGLang loads: those of its index, or all.

    Raises:
        ConfigError: the index cannot be read.
    """
    index = Path(folder, "model.safetensors.index.json")
    if not index.is_file():
        return sorted(Path(folder).glob("*.safetensors"))
    try:
        return [Path(folder, name) for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"the tensors of {folder} cannot be read: {index} is no index: {error}") from error


def read_headers(path: str) -> list[Tensor]:
    """Return every tensor of a checkpoint, from the headers of its safetensors files.

    Args:
        path: a folder, or a repository of the Hugging Face hub.

    Raises:
        ConfigError: there are no such files, or they cannot be read.
    """
    if not os.path.isdir(path):
        try:
            files = get_safetensors_metadata(path).files_metadata.values()
        except (NotASafetensorsRepoError, OfflineModeIsEnabled, HfHubHTTPError) as error:
            raise ConfigError(f"the tensors of {path} cannot be read: {' '.join(str(error).split())}") from error
        return [_tensor(name, info.shape, info.dtype) for file in files for name, info in file.tensors.items()]
    files = safetensors_files(path)
    if not files:
        raise ConfigError(f"the tensors of {path} cannot be read: there is no *.safetensors in it.")
    found = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
                found += [_tensor(name, part.get_shape(), part.get_dtype()) for name, part in slices.items()]
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"the tensors of {file} cannot be read: {error}") from error
    return found


def _tensor(name: str, shape: Iterable[int], dtype: str) -> Tensor:
    return Tensor(name, tuple(shape), _HEADER_DTYPES.get(dtype, dtype))


def draft_to_target(d2t: torch.Tensor, t2d: torch.Tensor | None, config: DFlashConfig) -> torch.Tensor:
    """Return the target's token for each of the drafter's.

    Args:
        d2t: [v] integer. Differences from a draft token to the target's, the convention of EAGLE-3 and speculators.
        t2d: [V] bool. The target's tokens that the drafter has; None: the checkpoint has no such tensor.

    Returns:
        [v] int64, ascending.

    Raises:
        ConfigError: the tensors are no such mapping.
    """
    tokens = torch.arange(len(d2t), device=d2t.device) + d2t.to(torch.int64)
    is_ascending = bool((tokens[1:] > tokens[:-1]).all())
    if not is_ascending or tokens[0] < 0 or tokens[-1] >= config.vocab_size:
        raise ConfigError(
            f"d2t of drafter {config.path} takes its tokens to {tokens[:3].tolist()} ... {tokens[-3:].tolist()}: "
            f"expected ascending tokens below vocab_size={config.vocab_size}; d2t holds differences of token ids."
        )
    if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], tokens):
        raise ConfigError(f"d2t and t2d of drafter {config.path} name different tokens.")
    return tokens
