"""The tiny pair's drafter in every checkpoint format, written as the libraries of the formats write it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.quantized import block_config, compressed_config, linear_layers, quantize
from transformers import Qwen3Config

from models.hybrid import DRAFTER_DIR as HYBRID_DRAFTER_DIR
from models.tiny import DRAFTER_DIR, TARGET_DIR

CONFIG = json.loads((DRAFTER_DIR / "config.json").read_text())
NUM_LAYERS = CONFIG["num_hidden_layers"]
HIDDEN_SIZE, VOCAB_SIZE = CONFIG["hidden_size"], CONFIG["vocab_size"]


def tensors() -> dict[str, torch.Tensor]:
    return load_file(DRAFTER_DIR / "model.safetensors")


def write(path: Path, config: dict, weights: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def speculators_config(**fields) -> dict:
    layers = Qwen3Config.from_dict(
        {name: CONFIG[name] for name in CONFIG if name not in ("architectures", "block_size", "dflash_config")}
    )
    return {
        "architectures": ["DFlashSpeculator"],
        "model_type": "speculator_model",
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "dtype": "bfloat16",
        "transformer_layer_config": layers.to_diff_dict(),
        "aux_hidden_state_layer_ids": [i + 1 for i in CONFIG["dflash_config"]["target_layer_ids"]],
        "mask_token_id": CONFIG["dflash_config"]["mask_token_id"],
        "block_size": CONFIG["block_size"],
        "draft_vocab_size": VOCAB_SIZE,
        "target_hidden_size": None,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
    } | fields


def speculators_symmetric(path: Path) -> Path:
    """Write the whole vocabulary, two-sided windows, and copies of the target's tensors that must not be read."""
    copies = {
        "embed_tokens.weight": torch.full((VOCAB_SIZE, HIDDEN_SIZE), torch.nan),
        "lm_head.weight": torch.full((VOCAB_SIZE, HIDDEN_SIZE), torch.nan),
        "verifier_norm.weight": torch.full((HIDDEN_SIZE,), torch.nan),
    }
    return write(path, speculators_config(sliding_window_non_causal=True), tensors() | copies)


def speculators_reduced(path: Path) -> Path:
    """Write a drafter with its own lm_head, over three of every four tokens."""
    t2d = torch.arange(VOCAB_SIZE) % 4 != 3
    tokens = t2d.nonzero()[:, 0]
    head = load_file(TARGET_DIR / "model.safetensors")["model.embed_tokens.weight"][tokens]
    own = {"lm_head.weight": head, "t2d": t2d, "d2t": tokens - torch.arange(len(tokens))}
    return write(path, speculators_config(draft_vocab_size=len(tokens)), tensors() | own)


def zlab_new_places(path: Path) -> Path:
    """Write DFlash's fields inside `dflash_config`, causal layers, and every optional field that has an effect."""
    inner = {
        "block_size": CONFIG["block_size"],
        "is_causal": True,
        "input_embedding_scale": 1.1,
        "attention_value_scale": 0.625,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 30.0,
    }
    config = {name: CONFIG[name] for name in CONFIG if name not in ("block_size", "use_sliding_window")}
    config |= {
        "attention_bias": True,
        "dflash_config": CONFIG["dflash_config"] | inner,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 1.28,
            "original_max_position_embeddings": 1600,
            "attention_factor": 1.05,
        },
    }
    generator = torch.Generator().manual_seed(0)
    weights = tensors()
    for i in range(NUM_LAYERS):
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            size = weights[f"layers.{i}.self_attn.{projection}.weight"].shape[0]
            weights[f"layers.{i}.self_attn.{projection}.bias"] = 0.05 * torch.randn(size, generator=generator)
        # The values stay as they were trained.
        weights[f"layers.{i}.self_attn.v_proj.weight"] /= inner["attention_value_scale"]
    return write(path, config, weights)


def zlab_default_layers(path: Path) -> Path:
    """Write one layer and no `target_layer_ids`. The default is the target's middle layer; its columns of `fc` stay."""
    kept = CONFIG["dflash_config"]["target_layer_ids"].index(CONFIG["num_target_layers"] // 2)
    config = CONFIG | {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "dflash_config": {"mask_token_id": CONFIG["dflash_config"]["mask_token_id"]},
        "rope_scaling": {"type": "linear", "factor": 1.01},
    }
    weights = tensors()
    weights["fc.weight"] = weights["fc.weight"].unflatten(1, (-1, HIDDEN_SIZE))[:, kept]
    return write(path, config, {name: weights[name] for name in weights if ".1." not in name and ".2." not in name})


def speculators_anchor(path: Path) -> Path:
    """Write a drafter whose bonus token's row predicts, with 7 drafts."""
    return write(path, speculators_config(sample_from_anchor=True, block_size=7), tensors())


def deepspec_config(**fields) -> dict:
    """Return a copy of the target's config with the drafter's fields at the top, and 7 drafts."""
    target = json.loads((TARGET_DIR / "config.json").read_text())
    config = {name: CONFIG[name] for name in CONFIG if name not in ("dflash_config", "layer_types", "sliding_window")}
    config = target | config | CONFIG["dflash_config"]
    config |= {"layer_types": ["full_attention"] * NUM_LAYERS, "use_sliding_window": False, "block_size": 7}
    config |= {"architectures": ["Qwen3DSparkModel"], "tie_word_embeddings": False, "num_anchors": 512}
    return config | fields


# Copies of the target's tensors that must not be read.
COPIES = {
    "embed_tokens.weight": torch.full((VOCAB_SIZE, HIDDEN_SIZE), torch.nan),
    "lm_head.weight": torch.full((VOCAB_SIZE, HIDDEN_SIZE), torch.nan),
}


def deepspec(path: Path) -> Path:
    """Write DeepSpec's block7."""
    return write(path, deepspec_config(markov_rank=0, enable_confidence_head=False), tensors() | COPIES)


def markov_tensors(rank: int, is_gated: bool) -> dict[str, torch.Tensor]:
    """Return a Markov head whose scores change drafts."""
    generator = torch.Generator().manual_seed(2)
    shapes = {"markov_w1.weight": (VOCAB_SIZE, rank), "markov_w2.weight": (VOCAB_SIZE, rank)}
    if is_gated:
        shapes |= {"gate_proj.weight": (rank, HIDDEN_SIZE + rank), "gate_proj.bias": (rank,)}
    return {
        f"markov_head.{name}": torch.randn(shape, generator=generator) * (0.1 if "gate" in name else 1.0)
        for name, shape in shapes.items()
    }


def deepspec_markov(path: Path) -> Path:
    """Write DSpark with a vanilla Markov head, and a confidence head, which is not read."""
    config = deepspec_config(
        markov_rank=6, markov_head_type="vanilla", enable_confidence_head=True, confidence_head_with_markov=True
    )
    confidence = {"proj.weight": torch.full((1, HIDDEN_SIZE + 6), torch.nan), "proj.bias": torch.full((1,), torch.nan)}
    confidence = {f"confidence_head.{name}": tensor for name, tensor in confidence.items()}
    return write(path, config, tensors() | COPIES | markov_tensors(6, is_gated=False) | confidence)


def speculators_gated(path: Path) -> Path:
    """Write DSpark with a gated Markov head in the speculators format, whose first row predicts nothing."""
    config = speculators_config(
        speculators_model_type="dspark",
        sample_from_anchor=False,
        markov_rank=6,
        markov_head_type="gated",
        enable_confidence_head=False,
        confidence_head_with_markov=False,
    )
    return write(path, config, tensors() | markov_tensors(6, is_gated=True))


def zlab_mask_embedding(path: Path) -> Path:
    """Write a drafter with its own embedding of the mask token, and a RoPE with fields that mean nothing to it."""
    copied = {"rope_dim": CONFIG["head_dim"], "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    rope = {"rope_type": "default", "rope_theta": CONFIG["rope_theta"]} | copied
    write(path, CONFIG | {"rope_parameters": rope}, tensors())
    mask = CONFIG["dflash_config"]["mask_token_id"]
    row = load_file(TARGET_DIR / "model.safetensors")["model.embed_tokens.weight"][mask].float()
    generator = torch.Generator().manual_seed(3)
    row += 0.3 * row.std() * torch.randn(row.shape, generator=generator)
    torch.save({"embedding": row, "mask_token_id": mask, "per_position": False}, path / "mask_embedding.pt")
    return path


# Of convolutions and a selector; every field differs from the library's default.
PARTS = {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}


def tensors_of_parts(codebook_suffix: str = "", config: dict = CONFIG) -> dict[str, torch.Tensor]:
    """Return convolutions near the identity, which keep the trained layers useful, and scores that change drafts."""
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int, std: float) -> torch.Tensor:
        return std * torch.randn(shape, generator=generator)

    taps, rank, hidden_size, vocab_size = 3, 6, config["hidden_size"], config["vocab_size"]
    groups = hidden_size // 4
    weights = {}
    for i in range(config["num_hidden_layers"]):
        for conv in ("attention_conv", "mlp_conv"):
            base = noise(2, taps, hidden_size, std=0.1)
            base[:, 0] += 1
            weights[f"layers.{i}.{conv}.base_kernel"] = base
            weights[f"layers.{i}.{conv}.kernel_projection.weight"] = noise(2 * taps * groups, hidden_size, std=0.01)
    selector = "candidate_selector."
    weights[f"{selector}predecessor_codebook{codebook_suffix}"] = noise(vocab_size, rank, std=1.0)
    weights[f"{selector}successor_codebook{codebook_suffix}"] = noise(vocab_size, rank, std=1.0)
    weights[f"{selector}hidden_projection.weight"] = noise(rank, hidden_size, std=0.02)
    return weights


def zlab_dflash2(path: Path) -> Path:
    """Write convolutions and a selector, a factor and a soft cap of the logits, and a causality of its own."""
    inner = CONFIG["dflash_config"] | PARTS | {"output_multiplier": 0.8, "final_logit_softcapping": 20.0}
    config = CONFIG | {"architectures": ["DFlash2DraftModel"], "is_causal": False, "dflash_config": inner}
    return write(path, config, tensors() | tensors_of_parts())


def speculators_dflash2(path: Path) -> Path:
    """Write the same parts in the other format, whose codebooks have another name, with 7 drafts."""
    config = speculators_config(speculators_model_type="dflash2", sliding_window_non_causal=True, block_size=8, **PARTS)
    return write(path, config, tensors() | tensors_of_parts(codebook_suffix=".weight"))


def identity_dflash2(path: Path) -> tuple[Path, Path]:
    """Write parts that change nothing, and the drafter without parts.

    Rows are convolved with themselves alone, and every pair scores 0. Pairs are normalised over the candidates, and
    positions without pairs over the vocabulary. A large factor leaves little probability outside the candidates.
    """
    inner = CONFIG["dflash_config"] | {"output_multiplier": 6.0}
    parts = tensors_of_parts()
    for name, tensor in parts.items():
        tensor.zero_()
        if name.endswith("base_kernel"):
            tensor[:, 0] = 1
    config = CONFIG | {"architectures": ["DFlash2DraftModel"]}
    config |= {"dflash_config": inner | PARTS | {"selector_top_k": 16}}
    plain = write(path.with_name(f"{path.name}_plain"), CONFIG | {"dflash_config": inner}, tensors())
    return write(path, config, tensors() | parts), plain


def hybrid_dflash2(path: Path) -> Path:
    """Write the same parts for the hybrid pair's target."""
    config = json.loads((HYBRID_DRAFTER_DIR / "config.json").read_text())
    weights = load_file(HYBRID_DRAFTER_DIR / "model.safetensors") | tensors_of_parts(config=config)
    return write(path, config | {"dflash_config": config["dflash_config"] | PARTS}, weights)


def write_both(path: Path, config: dict, quantized: dict, rounded: dict) -> tuple[Path, Path]:
    """Write a quantised checkpoint, and one with the same weights in float32."""
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    return write(path, config, quantized), write(path.with_name(f"{path.name}_rounded"), plain, rounded)


def quantized_dynamic(path: Path) -> tuple[Path, Path]:
    """Write llm-compressor's FP8_DYNAMIC of every linear layer, `fc` too, and the weights that it stands for."""
    inputs = {"dynamic": True, "strategy": "token"}
    config = CONFIG | {"quantization_config": compressed_config("channel", inputs, ["lm_head"])}
    return write_both(path, config, *quantize(tensors(), linear_layers(tensors()), "channel"))


def quantized_static(path: Path) -> tuple[Path, Path]:
    """Write llm-compressor's FP8, static, without `fc`, with a value scale and biases."""
    zlab_new_places(path.with_name("plain"))
    config = json.loads((path.with_name("plain") / "config.json").read_text())
    weights = load_file(path.with_name("plain") / "model.safetensors")
    layers = [name for name in linear_layers(weights) if name != "fc"]
    inputs = {"dynamic": False, "strategy": "tensor"}
    config |= {"quantization_config": compressed_config("tensor", inputs, ["re:.*fc", "lm_head"])}
    return write_both(path, config, *quantize(weights, layers, "tensor", inputs=True))


def quantized_blocks(path: Path) -> tuple[Path, Path]:
    """Write float8 in blocks, in which the layers of one MLP and the parts stay as they are."""
    weights = tensors() | tensors_of_parts()
    plain = [f"layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")]
    layers = [name for name in linear_layers(weights) if name not in plain and "selector" not in name]
    config = CONFIG | {
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": CONFIG["dflash_config"] | PARTS,
        "quantization_config": block_config(["model.layers.1.mlp", "candidate_selector"]),
    }
    return write_both(path, config, *quantize(weights, layers, "block", inverse=True))


def quantized_weights(path: Path) -> tuple[Path, Path]:
    """Write only weights in float8, of the parts too, in the speculators format."""
    config = speculators_config(speculators_model_type="dflash2", sliding_window_non_causal=True, block_size=8, **PARTS)
    config |= {"quantization_config": compressed_config("tensor", None, [])}
    weights = tensors() | tensors_of_parts(codebook_suffix=".weight")
    return write_both(path, config, *quantize(weights, linear_layers(weights), "tensor"))


# In groups, whose servers start together.
QUANTIZED = [(quantized_dynamic, quantized_static), (quantized_blocks, quantized_weights)]
FORMATS = [
    (speculators_symmetric, speculators_reduced),
    (zlab_new_places, zlab_default_layers),
    (speculators_anchor, deepspec),
    (zlab_dflash2, speculators_dflash2),
    (deepspec_markov, speculators_gated, zlab_mask_embedding),
]
