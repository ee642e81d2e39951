"""Model pairs that benchmarks serve: the shipped tiny pair, shapes with dummy weights, and any checkpoints."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

REPO = Path(__file__).resolve().parents[2]
TINY_PAIR = REPO / "models" / "tiny"
_TINY = {"tiny": TINY_PAIR / "target", "tiny-dflash": TINY_PAIR / "drafter"}

_QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN3_8B_DFLASH = _QWEN3_8B | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "layer_types": ["full_attention"] * 5,
    "max_window_layers": 5,
    "num_hidden_layers": 5,
    "num_target_layers": 36,
}
# Convolutions and a selector of the published sizes.
_PARTS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
# A pair whose GPU work is negligible, which shows the overhead of a cycle.
_SMALL = {
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_WINDOWED = {
    "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    "sliding_window": 128,
    "use_sliding_window": True,
    "num_hidden_layers": 3,
    "num_target_layers": 6,
    "dflash_config": {"mask_token_id": 4095, "target_layer_ids": [1, 2, 3]},
}
# Gated DeltaNet layers; every fourth layer has full attention instead.
_QWEN3_5_9B = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "attention_bias": False,
    "attn_output_gate": True,
    "bos_token_id": 248044,
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_text",
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 248320,
}
_QWEN3_5_9B_DFLASH = _QWEN3_8B_DFLASH | {
    "bos_token_id": 248044,
    "eos_token_id": 248044,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 8, 15, 22, 29]},
    "max_position_embeddings": 262144,
    "num_target_layers": 32,
    "rope_theta": 10000000,
    "vocab_size": 248320,
}
SHAPES = {
    "qwen3-8b": _QWEN3_8B,
    # Float8 weights with a scale for each block, as in the published checkpoint.
    "qwen3-8b-fp8": _QWEN3_8B
    | {
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        }
    },
    "qwen3-8b-dflash": _QWEN3_8B_DFLASH,
    "qwen3-8b-dflash-normal": _QWEN3_8B_DFLASH,
    "qwen3-8b-dflash-swa": _QWEN3_8B_DFLASH
    | {
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "sliding_window": 2048,
        "use_sliding_window": True,
    },
    # Every layer has experts.
    "qwen3-30b-a3b": _QWEN3_8B
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
    },
    "qwen3-30b-a3b-dflash": _QWEN3_8B_DFLASH
    | {
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 12, 23, 34, 45]},
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "layer_types": ["full_attention"] * 8,
        "max_window_layers": 8,
        "num_hidden_layers": 8,
        "num_key_value_heads": 4,
        "num_target_layers": 48,
    },
    "qwen3-8b-dflash2": _QWEN3_8B_DFLASH
    | {
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "dflash_config": _QWEN3_8B_DFLASH["dflash_config"] | _PARTS | {"block_size": 16},
    },
    # So few target layers that the drafter's cost of a long context shows.
    "shallow": _QWEN3_8B | {"num_hidden_layers": 6, "max_window_layers": 6},
    "shallow-dflash": _QWEN3_8B_DFLASH
    | {"num_target_layers": 6, "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 2, 3]}},
    "qwen3.5-9b": _QWEN3_5_9B,
    "qwen3.5-9b-dflash": _QWEN3_5_9B_DFLASH,
    "qwen3.5-9b-dflash-normal": _QWEN3_5_9B_DFLASH,
    "qwen3.5-27b": _QWEN3_5_9B
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "linear_num_value_heads": 48,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
    },
    "qwen3.5-27b-dflash": _QWEN3_5_9B_DFLASH
    | {
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_target_layers": 64,
    },
    "qwen3.5-27b-dflash2": _QWEN3_5_9B_DFLASH
    | {
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [5, 19, 33, 47, 61], "block_size": 8} | _PARTS,
        "block_size": 8,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_target_layers": 64,
    },
    "qwen3.5-35b-a3b": {name: value for name, value in _QWEN3_5_9B.items() if name != "intermediate_size"}
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "hidden_size": 2048,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3.5-35b-a3b-dflash": _QWEN3_5_9B_DFLASH
    | {
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 10, 19, 28, 37]},
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "num_target_layers": 40,
    },
    "small": _QWEN3_8B | _SMALL | {"num_hidden_layers": 6},
    "small-dflash": _QWEN3_8B_DFLASH | _SMALL | _WINDOWED,
}
# Drafters with normally distributed weights. With SGLang's dummy weights attention is a mean, so all tokens of a block
# are drafted alike. A target that verifies such a chain computes nearly the same row many times.
NORMAL_DRAFTERS = ("qwen3-8b-dflash-normal", "qwen3.5-9b-dflash-normal")
# State slots that SGLang gives a request under overlap scheduling, for targets with recurrent layers.
STATE_SLOTS = dict.fromkeys(("qwen3.5-9b", "qwen3.5-27b", "qwen3.5-35b-a3b"), 5)


@dataclass(frozen=True)
class Pair:
    """A target and a drafter.

    Attributes:
        target, drafter: names of `SHAPES` or of the tiny pair, folders, or repositories of the Hub.
        is_dummy: random weights in the shape of real ones. There is no text, and acceptance is simulated.
        accept_length: acceptance length to simulate by default; None to measure the drafter's.
        share: part of an 80 GB GPU, or of a machine without one, that an engine takes: with DFLASH, and without.
    """

    target: str
    drafter: str
    is_dummy: bool = False
    accept_length: float | None = None
    share: tuple[float, float] = (0.4, 0.33)


PAIRS = {
    "tiny": Pair("tiny", "tiny-dflash", share=(0.33, 0.33)),
    "qwen3-8b": Pair("qwen3-8b", "qwen3-8b-dflash", is_dummy=True, accept_length=6.5),
    "qwen3-8b-fp8": Pair("qwen3-8b-fp8", "qwen3-8b-dflash", is_dummy=True, accept_length=6.5),
    "qwen3-8b-normal": Pair("qwen3-8b", "qwen3-8b-dflash-normal", is_dummy=True, accept_length=6.5),
    "qwen3-8b-swa": Pair("qwen3-8b", "qwen3-8b-dflash-swa", is_dummy=True, accept_length=6.5),
    "qwen3-8b-dflash2": Pair("qwen3-8b", "qwen3-8b-dflash2", is_dummy=True, accept_length=6.5),
    "shallow": Pair("shallow", "shallow-dflash", is_dummy=True, accept_length=6.5, share=(0.2, 0.15)),
    "qwen3-30b-a3b": Pair("qwen3-30b-a3b", "qwen3-30b-a3b-dflash", is_dummy=True, accept_length=5, share=(0.95, 0.9)),
    "qwen3.5-9b": Pair("qwen3.5-9b", "qwen3.5-9b-dflash", is_dummy=True, accept_length=5, share=(0.8, 0.5)),
    "qwen3.5-9b-normal": Pair(
        "qwen3.5-9b", "qwen3.5-9b-dflash-normal", is_dummy=True, accept_length=5, share=(0.5, 0.5)
    ),
    "qwen3.5-27b": Pair("qwen3.5-27b", "qwen3.5-27b-dflash", is_dummy=True, accept_length=5, share=(0.95, 0.9)),
    "qwen3.5-27b-dflash2": Pair(
        "qwen3.5-27b", "qwen3.5-27b-dflash2", is_dummy=True, accept_length=4.5, share=(0.95, 0.9)
    ),
    "qwen3.5-35b-a3b": Pair(
        "qwen3.5-35b-a3b", "qwen3.5-35b-a3b-dflash", is_dummy=True, accept_length=5, share=(1.2, 1.1)
    ),
    "small": Pair("small", "small-dflash", is_dummy=True, accept_length=4, share=(0.02, 0.02)),
}


def find_pair(name: str) -> Pair:
    """Return a pair of `PAIRS`, or the pair of `TARGET:DRAFTER`.

    Raises:
        ValueError: the name is neither.
    """
    if name in PAIRS:
        return PAIRS[name]
    target, colon, drafter = name.partition(":")
    if not (target and colon and drafter):
        raise ValueError(f"--pairs {name}: expected one of {', '.join(PAIRS)}, or TARGET:DRAFTER.")
    return Pair(target, drafter)


def checkpoint(model: str, folder: Path, positions: int = 0) -> str:
    """Return the path or name that SGLang loads for a model.

    A shape is written to `folder` as a config, and SGLang fills in weights (`--load-format dummy`). Weights of
    `NORMAL_DRAFTERS` are written too. A target gets a tokenizer.

    Args:
        model: name of a shape or of the tiny pair, folder, or repository of the Hub.
        folder: for shapes.
        positions: raise a shape's `max_position_embeddings` to this, for prompts that the real model has no room for.
    """
    if model in _TINY:
        return str(_TINY[model])
    if model not in SHAPES:
        return model
    positions = max(positions, SHAPES[model]["max_position_embeddings"])
    path = folder / f"{model}-{positions}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPES[model] | {"max_position_embeddings": positions}))
    if "num_target_layers" not in SHAPES[model]:
        write_tokenizer(path, SHAPES[model]["vocab_size"])
    if model in NORMAL_DRAFTERS and not (path / "model.safetensors").exists():
        write_normal_weights(path, SHAPES[model])
    return str(path)


def write_normal_weights(folder: Path, config: dict) -> None:
    """Write weights in bf16: matrices of N(0, 0.02), and ones for norms."""
    # Imported here because they are slow to import, and seldom needed.
    import torch
    from safetensors.torch import save_file

    sys.path.append(str(REPO / "tests"))
    from support.oracle.drafter import ReferenceDrafter

    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in ReferenceDrafter(config).state_dict().items()}
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.empty(shape).normal_(std=0.02, generator=generator)
        for name, shape in shapes.items()
    }
    new = folder / "model.safetensors.new"
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, new)
    # The rename makes an interrupted file be written again.
    new.rename(folder / "model.safetensors")


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer with one word per token id, so that text has as many words as tokens and is never empty."""
    words = WordLevel({f"w{token}": token for token in range(vocab_size)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
