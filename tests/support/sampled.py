"""A target with an exactly known distribution, and a chi-square test of samples against it.

The target is a table: the logits after a token depend on that token alone. The checkpoint (`write_sampled_pair`) has
layers that add nothing to one-hot embeddings. So its logits equal the table's in every bit, in any dtype and batch.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import save_file
from support.chi_square import chi_square
from transformers import AutoTokenizer

from models.tiny import TARGET_DIR

VOCAB, NUM_NEW = 5, 3
FIRST, STOP = 2, 4
# Logits after each token: far from uniform, all different, and exact in bfloat16.
TABLE = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TABLE = TABLE.bfloat16().double()

SETTINGS = {
    "temperature 1": {},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 2": {"temperature": 2.0},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "top_k and top_p": {"temperature": 1.5, "top_k": 4, "top_p": 0.8},
    "top_p and min_p": {"temperature": 1.3, "top_p": 0.95, "min_p": 0.1},
    "penalties": {"frequency_penalty": 0.8, "presence_penalty": 0.4},
    "repetition, bias and stop": {
        "repetition_penalty": 1.7,
        "logit_bias": {"1": 0.8},
        "min_new_tokens": 3,
        "stop_token_ids": [STOP],
    },
}


def next_distribution(params: dict, generated: list[int]) -> torch.Tensor:
    """Return the next token's distribution [V] float64, written from SGLang's documentation and not from its code."""
    logits = TABLE[generated[-1]].clone()
    counts = torch.bincount(torch.tensor(generated), minlength=VOCAB)
    logits -= params.get("frequency_penalty", 0) * counts + params.get("presence_penalty", 0) * (counts > 0)
    if len(generated) < params.get("min_new_tokens", 0):
        logits[STOP] = -torch.inf
    repetition = params.get("repetition_penalty", 1)
    logits = torch.where(counts > 0, torch.where(logits < 0, logits * repetition, logits / repetition), logits)
    for token, value in params.get("logit_bias", {}).items():
        logits[int(token)] += value
    probs = (logits / params.get("temperature", 1)).softmax(dim=0)
    order = probs.argsort(descending=True)
    kept = torch.zeros(VOCAB, dtype=torch.bool)
    mass = 0.0
    for rank, token in enumerate(order.tolist()):
        likely = probs[token] >= params.get("min_p", 0) * probs.max()
        kept[token] = rank < params.get("top_k", VOCAB) and mass <= params.get("top_p", 1) and likely
        mass += float(probs[token])
    probs[~kept] = 0
    return probs / probs.sum()


def p_value(params: dict, tokens: torch.Tensor) -> float:
    """Return the p-value of continuations of `FIRST`, [samples, NUM_NEW], under the exact distribution."""
    probabilities = []
    for sequence in product(range(VOCAB), repeat=NUM_NEW):
        history, probability = [FIRST], 1.0
        for token in sequence:
            probability *= float(next_distribution(params, history)[token])
            history.append(token)
        probabilities.append(probability)
    code = (tokens * torch.tensor([VOCAB**2, VOCAB, 1])).sum(dim=1)
    expected = len(tokens) * torch.tensor(probabilities, dtype=torch.float64)
    return chi_square(torch.bincount(code, minlength=VOCAB**3), expected)


# --- as checkpoints -------------------------------------------------------------------------------------------------

# Follows no token, and is followed by `FIRST`.
START = VOCAB
MASK = START + 1
VOCAB_SIZE = 8
BLOCK_SIZE = 4
# A square number: a one-hot row has a root mean square of 1/16, which norms divide by exactly.
HIDDEN_SIZE = 256
HEADS, HEAD_DIM, INTERMEDIATE_SIZE = 4, 64, 128
NUM_TARGET_LAYERS = 2


def write_sampled_pair(folder: Path) -> tuple[Path, Path]:
    """Write `target/` and `drafter/` into `folder`, and return their paths.

    The drafter's hidden states are mixtures of the tokens that it sees, with random weights by position. So it drafts
    likely tokens, which depend on everything before.
    """
    target, drafter = folder / "target", folder / "drafter"
    one_hot = torch.eye(VOCAB_SIZE, HIDDEN_SIZE)
    logits = torch.full((VOCAB_SIZE, VOCAB_SIZE), -100.0)
    logits[:VOCAB, :VOCAB] = TABLE
    logits[START, FIRST] = 100
    # The drafter's own tokens start as mask tokens, which must not influence it.
    logits[MASK] = 0
    head = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)
    head[:, :VOCAB_SIZE] = logits.T
    norm = torch.full((HIDDEN_SIZE,), HIDDEN_SIZE**-0.5)
    tensors = {"model.embed_tokens.weight": one_hot, "model.norm.weight": norm, "lm_head.weight": head}
    for i in range(NUM_TARGET_LAYERS):
        tensors |= {f"model.layers.{i}.{name}": torch.zeros(shape) for name, shape in _layer_shapes().items()}
    fields = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": NUM_TARGET_LAYERS}
    _write(target, fields, tensors)
    tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR)
    # `min_new_tokens` also forbids the end-of-text token.
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(START)
    tokenizer.save_pretrained(target)

    generator = torch.Generator().manual_seed(0)
    pick = torch.zeros(HEADS, HEAD_DIM, HIDDEN_SIZE)
    pick[:, range(VOCAB), range(VOCAB)] = 1
    pick = pick.flatten(0, 1)
    layer = {name: torch.zeros(shape) for name, shape in _layer_shapes().items()} | {
        "input_layernorm.weight": norm,
        "self_attn.q_proj.weight": torch.randn(HEADS * HEAD_DIM, HIDDEN_SIZE, generator=generator),
        "self_attn.k_proj.weight": torch.randn(HEADS * HEAD_DIM, HIDDEN_SIZE, generator=generator),
        "self_attn.q_norm.weight": torch.full((HEAD_DIM,), 2.0),
        "self_attn.k_norm.weight": torch.ones(HEAD_DIM),
        "self_attn.v_proj.weight": pick,
        "self_attn.o_proj.weight": pick.T.contiguous(),
    }
    fields = {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 1,
        "num_target_layers": NUM_TARGET_LAYERS,
        "block_size": BLOCK_SIZE,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0]},
    }
    # The block's first token has most weight.
    tensors = {"fc.weight": torch.eye(HIDDEN_SIZE), "hidden_norm.weight": norm / 4, "norm.weight": norm}
    _write(drafter, fields, tensors | {f"layers.0.{name}": tensor for name, tensor in layer.items()})
    return target, drafter


def _layer_shapes() -> dict[str, tuple[int, ...]]:
    attention = HEADS * HEAD_DIM
    return {
        "self_attn.q_proj.weight": (attention, HIDDEN_SIZE),
        "self_attn.k_proj.weight": (attention, HIDDEN_SIZE),
        "self_attn.v_proj.weight": (attention, HIDDEN_SIZE),
        "self_attn.o_proj.weight": (HIDDEN_SIZE, attention),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
        "mlp.gate_proj.weight": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "mlp.up_proj.weight": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "mlp.down_proj.weight": (HIDDEN_SIZE, INTERMEDIATE_SIZE),
        "input_layernorm.weight": (HIDDEN_SIZE,),
        "post_attention_layernorm.weight": (HIDDEN_SIZE,),
    }


def _write(path: Path, fields: dict, tensors: dict[str, torch.Tensor]) -> None:
    path.mkdir(parents=True)
    config = {
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        # Negligible in comparison with a one-hot row's mean square.
        "rms_norm_eps": 1e-12,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "bos_token_id": START,
        "eos_token_id": START,
        "pad_token_id": START,
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config | fields))
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, path / "model.safetensors")
