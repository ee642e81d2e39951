"""The tensors of a DFlash checkpoint: which there must be, which there may be, and what is wrong with those there are.

Shapes: H hidden size, D head dimension, V the target's vocabulary, v the drafter's own if it has one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sglang_dflash.checkpoint.config import ConfigError, DFlashConfig

Shape = tuple[int, ...]


def checkpoint_name(name: str) -> str:
    """A tensor's name as this package knows it; some checkpoints put the drafter under `model.`."""
    return name.removeprefix("model.")


def expected_tensors(config: DFlashConfig) -> dict[str, Shape]:
    """Name and shape of every tensor that a checkpoint with this config must have."""
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
    return expected


def spare_tensors(config: DFlashConfig) -> dict[str, Shape]:
    """Name and shape of the tensors that a checkpoint may have and that are not loaded.

    A speculators checkpoint may carry frozen copies of the target's embedding, lm_head and norm, which its own library
    takes from the target as well.
    """
    if not config.is_speculators:
        return {}
    head = (config.draft_vocab_size or config.vocab_size, config.hidden_size)
    spare = {
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "verifier_lm_head.weight": head,
        "verifier_norm.weight": (config.hidden_size,),
        "t2d": (config.vocab_size,),
    }
    if config.draft_vocab_size is None:
        spare |= {"lm_head.weight": head, "d2t": (config.vocab_size,)}
    return spare


def tensor_problems(config: DFlashConfig, found: Mapping[str, Shape]) -> list[str]:
    """What is wrong with a checkpoint's tensors.

    Args:
        found: name -> shape, as in the checkpoint.

    Returns:
        a phrase for every unexpected, wrongly shaped or missing tensor.
    """
    expected = expected_tensors(config)
    known = spare_tensors(config) | expected
    problems = []
    for name, shape in found.items():
        want = known.get(checkpoint_name(name))
        if want is None:
            problems.append(f"unexpected {name} {list(shape)}")
        elif tuple(shape) != want:
            problems.append(f"{name} has shape {list(shape)}, expected {list(want)}")
    names = {checkpoint_name(name) for name in found}
    return problems + [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in names]


def draft_to_target(d2t: torch.Tensor, t2d: torch.Tensor | None, config: DFlashConfig) -> torch.Tensor:
    """The target's token for each of the drafter's.

    Args:
        d2t: [v] integer, what to add to a draft token to get the target's (the convention of EAGLE-3 and speculators).
        t2d: [V] bool, the target's tokens that the drafter has; None if the checkpoint does not say.

    Returns:
        [v] int64, ascending.

    Raises:
        ConfigError: they are no such mapping.
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
