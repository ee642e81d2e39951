"""LoRA adapters of the tiny pair's target with random weights, in PEFT's format."""

from __future__ import annotations

import json
import os
import tempfile
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save
from support.files import replace_file

from models.tiny import TARGET_DIR

RANK = 4
ATTENTION = ("q_proj", "k_proj", "v_proj")
LAYERS = (*ATTENTION, "o_proj", "gate_proj", "up_proj", "down_proj")
VOCABULARY = ("embed_tokens", "lm_head")


@cache
def adapter(name: str, modules: tuple[str, ...] = LAYERS, strength: float = 0.05) -> str:
    """Write an adapter and return its folder.

    Args:
        name: different names have different weights.
        modules: names of the adapted layers.
        strength: size of the change relative to the layers' weights.
    """
    folder = Path(tempfile.gettempdir()) / f"sglang-dflash-test-adapters-{os.getuid()}" / name
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((TARGET_DIR / "config.json").read_text())
    generator = torch.Generator().manual_seed(sum(name.encode()))
    tensors = {}
    for path, (num_inputs, num_outputs) in _shapes(config, modules).items():
        a = torch.randn(RANK, num_inputs, generator=generator)
        b = torch.randn(num_outputs, RANK, generator=generator)
        is_table = path.endswith("embed_tokens")
        kind = "lora_embedding_{}" if is_table else "lora_{}.weight"
        tensors[f"base_model.model.{path}.{kind.format('A')}"] = a * num_inputs**-0.5 if not is_table else a * 0.05
        tensors[f"base_model.model.{path}.{kind.format('B')}"] = b * strength
    replace_file(folder / "adapter_model.safetensors", save(tensors))
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4 * RANK, "target_modules": list(modules)}
    replace_file(folder / "adapter_config.json", json.dumps(fields).encode())
    return str(folder)


def _shapes(config: dict, modules: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of each adapted layer, by its name in a checkpoint."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (config["head_dim"] * config[f"num_{name}_heads"] for name in ("attention", "key_value"))
    sizes = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    shapes = {
        f"model.layers.{layer}.{path}": size
        for layer in range(config["num_hidden_layers"])
        for path, size in sizes.items()
        if path.split(".")[1] in modules
    }
    vocabulary = {"model.embed_tokens": (config["vocab_size"], hidden), "lm_head": (hidden, config["vocab_size"])}
    return shapes | {path: size for path, size in vocabulary.items() if path.split(".")[-1] in modules}
