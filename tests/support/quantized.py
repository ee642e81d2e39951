"""Checkpoints with float8 weights, as llm-compressor and others write them."""

from __future__ import annotations

import torch


def quantize(
    weights: dict[str, torch.Tensor], modules: list[str], scales: str, *, inverse: bool = False, inputs: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return a checkpoint with float8 weights, and the same weights in float32.

    Args:
        modules: the layers to quantise.
        scales: "tensor", "channel" or "block", of 128 x 128.
        inverse: name the scales of blocks as the format fp8 does.
        inputs: add static scales of the inputs.
    """
    quantized, rounded = dict(weights), {name: tensor.float() for name, tensor in weights.items()}
    for module in modules:
        weight = weights[f"{module}.weight"].float()
        rows, columns = {"tensor": weight.shape, "channel": (1, weight.shape[1]), "block": (128, 128)}[scales]
        padded = torch.zeros(-(-weight.shape[0] // rows) * rows, -(-weight.shape[1] // columns) * columns)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        tiles = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scale = tiles.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        float8 = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        dense = (float8.float() * scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)
        cut = slice(weight.shape[0]), slice(weight.shape[1])
        quantized[f"{module}.weight"] = float8.flatten(2, 3).flatten(0, 1)[cut]
        quantized[f"{module}.weight_scale{'_inv' * inverse}"] = scale.flatten() if scales == "tensor" else scale
        rounded[f"{module}.weight"] = dense[cut]
        if inputs:
            quantized[f"{module}.input_scale"] = torch.tensor(0.01)
    return quantized, rounded


def linear_layers(weights: dict[str, torch.Tensor]) -> list[str]:
    """Return the linear layers of a checkpoint without its own vocabulary."""
    names = [name.removesuffix(".weight") for name, tensor in weights.items() if tensor.dim() == 2]
    return [name for name in names if "markov" not in name and "codebook" not in name]


def compressed_config(scales: str, inputs: dict | None, ignored: list[str]) -> dict:
    """Return a `quantization_config` as llm-compressor writes it."""
    number = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "block_structure": None}
    weights = number | {"strategy": scales, "dynamic": False, "observer": "minmax", "actorder": None}
    inputs = inputs and number | {"observer": None} | inputs
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"format": "float-quantized"}},
        "ignore": ignored,
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    }


def block_config(ignored: list[str]) -> dict:
    """Return a `quantization_config` of the format fp8, with a scale per block of 128 x 128."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ignored,
    }
