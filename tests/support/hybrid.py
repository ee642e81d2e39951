"""Tiny hybrid targets with Gated DeltaNet and full attention, and drafters for them, with seeded random weights.

Their states forget slowly and their text does not repeat, so a wrong state changes the tokens.
"""

import json
import math
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from models.tiny import TARGET_DIR
from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.formats import to_qwen3_config
from sglang_dflash.checkpoint.tensors import expected_tensors

BLOCK_SIZE = 16
# Of the tiny pair's tokenizer.
VOCAB_SIZE = 1024
HIDDEN_SIZE = 64
NUM_LAYERS = 4
TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
# Every fourth layer has full attention. SGLang reads this field, which transformers does not write.
INTERVAL = {"full_attention_interval": 4}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
# Positions in time, height and width, which are equal for text.
MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": HIDDEN_SIZE,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}
# Configuration of image processing, which SGLang needs at start-up.
_PIXELS = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "processor_class": "Qwen3VLProcessor"}
_PIXELS |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}
PROCESSORS = {
    "preprocessor_config.json": _PIXELS | {"image_processor_type": "Qwen2VLImageProcessor"},
    "video_preprocessor_config.json": _PIXELS | {"video_processor_type": "Qwen3VLVideoProcessor"},
}
# Class of transformers' config and its fields, by architecture.
CONFIGS = {
    "Qwen3_5ForCausalLM": ("Qwen3_5TextConfig", TEXT),
    "Qwen3_5MoeForCausalLM": ("Qwen3_5MoeTextConfig", TEXT | EXPERTS),
    "Qwen3_5ForConditionalGeneration": ("Qwen3_5Config", {"text_config": TEXT | MROPE, "vision_config": VISION}),
    "Qwen3_5MoeForConditionalGeneration": (
        "Qwen3_5MoeConfig",
        {"text_config": TEXT | EXPERTS | MROPE, "vision_config": VISION},
    ),
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", TEXT | EXPERTS),
}


def write_target(path: Path, architecture: str = "Qwen3_5ForCausalLM", **sizes: int) -> Path:
    """Write a checkpoint that SGLang and transformers can read. `sizes` replace fields of `TEXT`."""
    model = build_target(architecture, sizes)
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config.get("text_config", config).update(INTERVAL)
    return write_config(path, architecture, config)


def write_config(path: Path, architecture: str, config: dict | None = None) -> Path:
    """Write all files of a checkpoint except the weights. `config` replaces the architecture's config."""
    path.mkdir(exist_ok=True)
    if config is None:
        config = _config(architecture).to_dict() | {"architectures": [architecture]}
        config.get("text_config", config).update(INTERVAL)
    (path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET_DIR / name, path)
    if "vision_config" in config:
        for name, fields in PROCESSORS.items():
            (path / name).write_text(json.dumps(fields))
    return path


def _config(architecture: str, sizes: dict[str, int] | None = None) -> PretrainedConfig:
    kind, fields = CONFIGS[architecture]
    if "text_config" in fields:
        fields = fields | {"text_config": fields["text_config"] | (sizes or {})}
    else:
        fields = fields | (sizes or {})
    return getattr(transformers, kind)(**fields, dtype="float32")


def build_target(architecture: str, sizes: dict[str, int] | None = None) -> PreTrainedModel:
    model = getattr(transformers, architecture)(_config(architecture, sizes))
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            # States forget half of their content in 1 to 200 tokens.
            weight.data = torch.linspace(-5.0, 0.0, len(weight))
        elif name.endswith("dt_bias"):
            weight.data.zero_()
        elif name.endswith("conv1d.weight"):
            weight.data = torch.randn(weight.shape, generator=generator) * 0.5
        elif weight.dim() > 1:
            # Larger than a trained model's, so that the text does not settle into a loop.
            weight.data = torch.randn(weight.shape, generator=generator) * 2 * weight.shape[-1] ** -0.5
    return model.eval()


def write_drafter(path: Path, block_size: int = BLOCK_SIZE, **sizes: int) -> Path:
    path.mkdir(parents=True)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": block_size,
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1, 2]},
        "num_target_layers": NUM_LAYERS,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "attention_bias": False,
        "layer_types": ["full_attention"],
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    } | sizes
    (path / "config.json").write_text(json.dumps(config))
    drafter = DFlashConfig.from_dict(to_qwen3_config(config, str(path)).to_dict(), str(path))
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(shape, generator=generator) * math.prod(shape[1:]) ** -0.5
        for name, shape in expected_tensors(drafter).items()
    }
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def prompt_of(length: int, start: int = 0) -> list[int]:
    """Return tokens of the targets' vocabulary in an order that no target can predict."""
    return [2 + (start + 7 * i + i * i // 5) % (VOCAB_SIZE - 2) for i in range(length)]


def load_reference(path: Path, architecture: str) -> PreTrainedModel:
    """Return transformers' model of the target in float32."""
    return getattr(transformers, architecture).from_pretrained(path, dtype=torch.float32).eval()


def greedy(model: PreTrainedModel, prompts: list[list[int]], length: int) -> list[list[int]]:
    """Return the prompts, all of one length, each with `length` more tokens."""
    inputs = torch.tensor(prompts)
    with torch.inference_mode():
        tokens = model.generate(
            inputs,
            # Otherwise transformers would mask prompt tokens that equal the padding token.
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=length,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return tokens.tolist()


def first_difference(model: PreTrainedModel, prompt: list[int], output: list[int]) -> int | None:
    """Return the index of the first output token that is not the greedy one; None if all are."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
    wrong = (logits.argmax(-1) != torch.tensor(output)).nonzero()
    return int(wrong[0]) if len(wrong) else None


def states_after(model: PreTrainedModel, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states of the recurrent layers after a prefill.

    Returns:
        conv: [layers, channels, inputs]. The last inputs of the convolutions.
        temporal: [layers, value heads, value_dim, key_dim].
    """
    with torch.inference_mode():
        layers = model(torch.tensor([tokens]), use_cache=True).past_key_values.layers
    recurrent = [layer for layer in layers if isinstance(layer, LinearAttentionLayer)]
    conv = torch.stack([layer.conv_states[0][0, :, 1:] for layer in recurrent])
    return conv, torch.stack([layer.recurrent_states[0][0].transpose(-1, -2) for layer in recurrent])
