"""A tiny target with sliding-window layers and a drafter for it, with seeded random weights.

The greedy text must not repeat, or it would not depend on what a layer sees; sharp attention ensures that. The drafter
is random too. The vocabulary is small, so the drafter guesses the right token now and then.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from models.tiny import TARGET_DIR
from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.formats import to_qwen3_config
from sglang_dflash.checkpoint.tensors import expected_tensors

WINDOW = 48
BLOCK_SIZE = 8
VOCAB_SIZE = 16
HIDDEN_SIZE = 128
# Sizes that GPU attention kernels support. The drafter's KV has another geometry than the target's.
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
DRAFT_HEADS, DRAFT_KV_HEADS, DRAFT_HEAD_DIM = 3, 3, 128
DRAFT_LAYER_TYPES = ["sliding_attention", "full_attention"]
INTERMEDIATE_SIZE = 192
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]


def write_windowed_pair(folder: Path) -> tuple[Path, Path]:
    """Write `target/` and `drafter/` into `folder`, and return their paths."""
    target, drafter = folder / "target", folder / "drafter"
    write_target(target)
    write_drafter(drafter)
    return target, drafter


def write_target(path: Path) -> None:
    """Write a Laguna target, the plainest dense class with sliding layers whose hidden states SGLang captures."""
    path.mkdir(parents=True)
    # Written in full for each kind of layer, because SGLang and transformers have different defaults.
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    config = {
        "architectures": ["LagunaForCausalLM"],
        "model_type": "laguna",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": len(LAYER_TYPES),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "layer_types": LAYER_TYPES,
        "mlp_layer_types": ["dense"] * len(LAYER_TYPES),
        "sliding_window": WINDOW,
        "gating": "per-head",
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN_SIZE),
        "model.norm.weight": (HIDDEN_SIZE,),
        "lm_head.weight": (VOCAB_SIZE, HIDDEN_SIZE),
    }
    for i in range(len(LAYER_TYPES)):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer_shapes().items()}
    save_random(shapes, path / "model.safetensors", seed=0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET_DIR / name, path)


def write_drafter(path: Path) -> None:
    path.mkdir(parents=True)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": BLOCK_SIZE,
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1, 2]},
        "num_target_layers": len(LAYER_TYPES),
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": len(DRAFT_LAYER_TYPES),
        "num_attention_heads": DRAFT_HEADS,
        "num_key_value_heads": DRAFT_KV_HEADS,
        "head_dim": DRAFT_HEAD_DIM,
        "attention_bias": False,
        "layer_types": DRAFT_LAYER_TYPES,
        "sliding_window": 32,
        "use_sliding_window": True,
        "max_window_layers": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    drafter = DFlashConfig.from_dict(to_qwen3_config(config, str(path)).to_dict(), str(path))
    save_random(expected_tensors(drafter), path / "model.safetensors", seed=1)


def layer_shapes() -> dict[str, tuple[int, ...]]:
    return {
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN_SIZE),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
        "self_attn.o_proj.weight": (HIDDEN_SIZE, HEADS * HEAD_DIM),
        "self_attn.g_proj.weight": (HEADS, HIDDEN_SIZE),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
        "mlp.gate_proj.weight": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "mlp.up_proj.weight": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "mlp.down_proj.weight": (HIDDEN_SIZE, INTERMEDIATE_SIZE),
        "input_layernorm.weight": (HIDDEN_SIZE,),
        "post_attention_layernorm.weight": (HIDDEN_SIZE,),
    }


def save_random(shapes: dict[str, tuple[int, ...]], path: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            # A norm. Those of queries and keys are large, which makes attention sharp.
            tensors[name] = torch.full(shape, 2.0 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0)
        else:
            tensors[name] = torch.randn(shape, generator=generator) * shape[1] ** -0.5
    save_file(tensors, path, metadata={"format": "pt"})
