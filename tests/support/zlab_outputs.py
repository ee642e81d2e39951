"""Outputs of z-lab's own library for tiny random drafters, which tests compare with.

`zlab_outputs.json` has them, so tests do not need the library. To write it again, install `dflash==0.1.0` (PyPI) with
`--no-deps`, and run from the checkout, with `tests` and `cpu` on `PYTHONPATH`:

    python -m support.zlab_outputs

Weights and inputs come from NumPy's generator, whose numbers are the same in every version. Every field of the configs
differs from its default, and windows are narrower than blocks.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import torch

from sglang_dflash_cpu.platform import activate

PATH = Path(__file__).with_name("zlab_outputs.json")
CONTEXT, BONUS_TOKEN = 11, 5
TEMPERATURE = 0.7
_LAYERS = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "attention_bias": False,
    "max_position_embeddings": 128,
    "num_target_layers": 6,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 4,
    "use_sliding_window": True,
    "max_window_layers": 3,
    "is_causal": False,
    "tie_word_embeddings": False,
}
_PARTS = {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 7, "selector_top_k": 5}
CONFIGS = {
    "odd sizes": _LAYERS
    | {
        "dflash_config": _PARTS
        | {
            "block_size": 6,
            "mask_token_id": 96,
            "target_layer_ids": [1, 3],
            "output_multiplier": 0.4,
            "final_logit_softcapping": 9.0,
            "input_embedding_scale": 1.3,
        },
    },
    "published sizes": _LAYERS
    | {
        "is_causal": None,
        "dflash_config": {
            "block_size": 8,
            "mask_token_id": 3,
            "target_layer_ids": [1, 3],
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 16,
            "selector_top_k": 16,
        },
    },
}


def values(name: str, shape: tuple[int, ...], scale: float = 0.3) -> torch.Tensor:
    """Return normal numbers, float32, that depend on the name alone."""
    generator = np.random.RandomState(zlib.crc32(name.encode()))
    return torch.from_numpy(scale * generator.standard_normal(shape)).float()


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    """Give a model its weights, under the names of checkpoints. Norms are near 1."""
    for name, weight in model.named_parameters():
        name = name.replace("_codebook.weight", "_codebook")
        weight.copy_(values(name, tuple(weight.shape)) + (1.0 if "norm" in name else 0.0))


def inputs(config: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return features of the context [1, CONTEXT, F], the target's embedding [V, H], and its lm_head [V, H]."""
    table = (config["vocab_size"], config["hidden_size"])
    num_features = len(config["dflash_config"]["target_layer_ids"]) * config["hidden_size"]
    return (
        values("features", (1, CONTEXT, num_features)),
        values("embedding", table, 1.0),
        values("lm_head", table, 1.0),
    )


def block_of(config: dict) -> torch.Tensor:
    """Return the tokens of a block, [W] int64."""
    own = config["dflash_config"]
    return torch.tensor([BONUS_TOKEN] + [own["mask_token_id"]] * (own["block_size"] - 1))


@torch.no_grad()
def compute(config: dict) -> dict[str, list]:
    """Return what z-lab's library computes: rows of the drafter, the greedy path, and a sampled one with its q."""
    from dflash.model import DFlash2DraftModel, _make_cache
    from transformers import Qwen3Config

    model = DFlash2DraftModel(Qwen3Config.from_dict(config)).eval()
    fill(model)
    features, embedding, lm_head = inputs(config)
    block = block_of(config)
    embedded = embedding[block][None] * config["dflash_config"].get("input_embedding_scale", 1.0)
    rows = model(
        target_hidden=features,
        noise_embedding=embedded,
        position_ids=torch.arange(CONTEXT + len(block))[None],
        past_key_values=_make_cache(model.config),
        use_cache=True,
    )
    head = torch.nn.Linear(*lm_head.T.shape, bias=False)
    head.weight.copy_(lm_head)
    path, candidates, _ = model.propose(rows[:, 1:], block[:1], head, 0.0)
    torch.manual_seed(0)
    sampled, sampled_candidates, q = model.propose(rows[:, 1:], block[:1], head, TEMPERATURE)
    outputs = {"rows": rows, "path": path, "candidates": candidates}
    outputs |= {"sampled_path": sampled, "sampled_candidates": sampled_candidates, "q": q}
    return {name: tensor[0].tolist() for name, tensor in outputs.items()}


def stored() -> dict[str, dict[str, torch.Tensor]]:
    """Return the stored outputs of every config."""
    return {
        name: {output: torch.tensor(numbers) for output, numbers in outputs.items()}
        for name, outputs in json.loads(PATH.read_text()).items()
    }


if __name__ == "__main__":
    # Without a GPU, transformers fails to import torchvision.
    activate()
    PATH.write_text(json.dumps({name: compute(config) for name, config in CONFIGS.items()}))
