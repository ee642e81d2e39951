"""Config of a DFlash checkpoint, read once into a frozen object, and checked against its target.

Reads z-lab's `config.json`, a Qwen3 config with `block_size` and `dflash_config`, which `formats.py` makes of every
checkpoint.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sglang_dflash.checkpoint.quantization import Quantization, read_quantization
from sglang_dflash.errors import ConfigError

ARCHITECTURE = "DFlashDraftModel"
# Formats of checkpoints. `formats.py` writes the name to `dflash_format`; without it a config is in z-lab's.
ZLAB, SPECULATORS, DEEPSPEC = "z-lab", "speculators", "DeepSpec"
# `model_type` of the target whose captured layers are counted by their inputs.
MUSE = "muse_glimmer"
# Kinds of pairs.
SELECTOR, MARKOV, GATED = "selector", "markov", "gated"

# The targets with recurrent layers that are served: they have Gated DeltaNet and full attention.
HYBRID_ARCHITECTURES = (
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3NextForCausalLM",
)

# Attention backends whose windows limit the keys on both sides of a query. The windows of others limit its left side,
# and only causality limits its right side.
TWO_SIDED_BACKENDS = ("fa3", "torch_native", "triton")


@dataclass(frozen=True)
class LayerAttention:
    """Mask of one drafter layer.

    Attributes:
        window: int or None. A query at position p sees keys k with |p - k| < window; None: no limit. A causal layer
            sees the `window` keys in (p - window, p], another one also those in (p, p + window).
        causal: bool. Whether a row of a block sees only itself and the rows before it. Otherwise it sees all rows.
    """

    window: int | None
    causal: bool

    def __str__(self) -> str:
        reach = "full" if self.window is None else f"sliding {self.window}"
        return f"{reach}, {'causal' if self.causal else 'bidirectional'}"


@dataclass(frozen=True)
class Convolutions:
    """Convolutions around the attention and the MLP of every layer, over the rows of a block.

    Attributes:
        taps: int. Rows that a row is made of: itself and those right before it.
        group_size: int. Neighbouring channels that share the weights that depend on the row.
    """

    taps: int
    group_size: int

    def __str__(self) -> str:
        return f"{self.taps} taps, groups of {self.group_size} channels"


@dataclass(frozen=True)
class Pairs:
    """Scores of pairs of neighbouring drafts, which are added to the logits of the second one.

    A score is a product of two vectors, of the draft before and of the draft. The vector of the draft before is
    multiplied by one that is computed from the hidden state ("selector"), by a gate that is computed from both
    ("gated"), or by nothing ("markov").

    Attributes:
        kind: SELECTOR, MARKOV or GATED.
        rank: int. Size of a vector.
        num_candidates: int. Draft tokens of each position that get a score: those with the largest logits.
    """

    kind: str
    rank: int
    num_candidates: int

    def __str__(self) -> str:
        return f"{self.kind} of rank {self.rank}, {self.num_candidates} candidates"


@dataclass(frozen=True)
class DFlashConfig:
    """A DFlash drafter as its checkpoint describes it.

    A drafter is a stack of layers with optional parts: convolutions, pairs, and a first row that predicts. No part
    implies another one.

    Attributes:
        target_layer_ids: tuple of int. The target layers whose output is a context feature, in the order of
            concatenation (HF `hidden_states[id + 1]`).
        names_outputs: bool. Whether `target_layer_ids` name outputs of layers where the target is Muse Glimmer. SGLang
            captures inputs there, and drafters of v1 name those. Other targets do not ask.
        num_target_layers: int or None. Layers of the target that the drafter was trained for; None: the format has no
            such field.
        block_size: int. Tokens of one verified block: the bonus token and `block_size - 1` drafts.
        predicts_from_anchor: bool. The row of the bonus token predicts the first draft, and each row the token after
            it. Otherwise each row of a mask token predicts its own token, and the first row predicts nothing.
        conv: convolutions; None: there are none.
        pairs: scores of pairs of drafts; None: positions are predicted independently.
        confidence_inputs: int. Inputs of the checkpoint's head that predicts acceptance, which is not loaded; 0: there
            is none.
        layers: tuple. The mask of every drafter layer.
        draft_vocab_size: int or None. Tokens of the drafter's own lm_head, for a part of the target's vocabulary; None:
            it drafts with the target's lm_head.
        input_embedding_scale: float. Factor of the rows of the target's embedding table.
        attention_value_scale: float. Factor of the values of attention, in blocks and context.
        output_multiplier: float. Factor of the logits.
        final_logit_softcapping: float or None. Cap c of c * tanh(x / c) on the multiplied logits x; None: no cap.
        rope_type: "default", "linear", "yarn" or "llama3".
        format: ZLAB, SPECULATORS or DEEPSPEC.
        quantization: float8 weights; None: there are none.
    """

    path: str
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    attention_bias: bool
    vocab_size: int
    block_size: int
    predicts_from_anchor: bool
    conv: Convolutions | None
    pairs: Pairs | None
    confidence_inputs: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    names_outputs: bool
    num_target_layers: int | None
    layers: tuple[LayerAttention, ...]
    draft_vocab_size: int | None
    input_embedding_scale: float
    attention_value_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None
    rope_type: str
    rope_parameters: dict[str, Any]
    rms_norm_eps: float
    format: str
    quantization: Quantization | None

    @property
    def window(self) -> int | None:
        """Return the window size of the sliding layers; None: every layer is full."""
        windows = {layer.window for layer in self.layers if layer.window is not None}
        return windows.pop() if windows else None

    def captured_layers(self, target_model_type: str) -> list[int]:
        """Return the layers as SGLang's target takes them to capture."""
        shift = int(self.names_outputs and target_model_type == MUSE)
        return [layer_id + shift for layer_id in self.target_layer_ids]

    def draft_rows(self, block_size: int) -> int:
        """Return the rows of the drafter's forward for `block_size` verified tokens."""
        return block_size - 1 if self.predicts_from_anchor else block_size

    def num_candidates(self, default: int) -> int:
        """Return the candidates of a position: the drafter's own number where it scores pairs, else `default`."""
        return default if self.pairs is None else self.pairs.num_candidates

    def kv_bytes_per_token(self, itemsize: int, tp_size: int = 1) -> int:
        """Return the bytes of one token's keys and values in all layers, on one of `tp_size` ranks.

        Args:
            itemsize: bytes of one number of the KV pool.
        """
        # Fewer KV heads than ranks are replicated (`ModelConfig.get_num_kv_heads`).
        num_kv_heads = max(1, self.num_key_value_heads // tp_size)
        return len(self.layers) * 2 * num_kv_heads * self.head_dim * itemsize

    @classmethod
    def from_dict(cls, config: dict[str, Any], path: str) -> DFlashConfig:
        """Read z-lab's fields, as :func:`formats.to_qwen3_config` makes them.

        Args:
            config: the fields.
            path: of the checkpoint, for messages.

        Raises:
            ConfigError: a field is missing or makes no sense; names it and its value.
        """
        read = _Reader(config, path)
        num_layers = read.positive_int("num_hidden_layers")
        # Only the default of the captured layers needs it.
        is_optional = read.get("num_target_layers") is None and read.get("target_layer_ids") is not None
        num_target_layers = None if is_optional else read.positive_int("num_target_layers")
        num_heads, num_kv_heads = read.heads()
        vocab_size, hidden_size = read.positive_int("vocab_size"), read.positive_int("hidden_size")
        target_hidden_size = config.get("target_hidden_size")
        if target_hidden_size not in (None, hidden_size):
            raise read.error("target_hidden_size", target_hidden_size, f"the drafter's own hidden_size={hidden_size}")
        # Related drafters have them; this package does not compute them.
        for field, off in (("attention_sink_bias", False), ("gating", False), ("aux_hidden_norms", False)):
            if read.get(field) not in (None, off):
                raise read.error(field, read.get(field), f"{json.dumps(off)} or nothing")
        predicts_from_anchor = read.flag("sample_from_anchor")
        draft_rows, draft_vocab_size = read.block_size(), read.draft_vocab_size(vocab_size)
        pairs = read.pairs(vocab_size)
        if pairs is not None and draft_vocab_size is not None:
            raise read.error("draft_vocab_size", draft_vocab_size, f"vocab_size={vocab_size}, as pairs have all tokens")
        return cls(
            path=path,
            hidden_size=hidden_size,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=read.positive_int("head_dim"),
            intermediate_size=read.positive_int("intermediate_size"),
            attention_bias=bool(config.get("attention_bias", False)),
            vocab_size=vocab_size,
            block_size=draft_rows + 1 if predicts_from_anchor else draft_rows,
            predicts_from_anchor=predicts_from_anchor,
            conv=read.convolutions(hidden_size, draft_rows),
            pairs=pairs,
            confidence_inputs=read.confidence_inputs(hidden_size, pairs),
            mask_token_id=read.mask_token_id(),
            target_layer_ids=read.target_layer_ids(num_layers, num_target_layers),
            names_outputs=bool(config.get("dflash_names_outputs")),
            num_target_layers=num_target_layers,
            layers=read.layers(num_layers),
            draft_vocab_size=draft_vocab_size,
            input_embedding_scale=read.positive_number("input_embedding_scale", default=1.0),
            attention_value_scale=read.positive_number("attention_value_scale", default=1.0),
            output_multiplier=read.positive_number("output_multiplier", default=1.0),
            final_logit_softcapping=read.positive_number("final_logit_softcapping", default=None),
            rope_type=config["rope_parameters"]["rope_type"],
            # SGLang adds and removes this name.
            rope_parameters={name: value for name, value in config["rope_parameters"].items() if name != "type"},
            rms_norm_eps=read.positive_number("rms_norm_eps", default=None),
            format=config.get("dflash_format", ZLAB),
            quantization=read_quantization(config.get("dflash_quantization"), path),
        )

    def check_target(self, target: TargetFacts) -> None:
        """Raise :class:`ConfigError` naming the first field that does not fit the target."""
        for mismatch in self.mismatches(target):
            raise ConfigError(mismatch)

    def mismatches(self, target: TargetFacts) -> list[str]:
        """Return a sentence for every field that does not fit the target."""
        where = f"drafter {self.path}"
        found = []
        if target.is_recurrent and target.architecture not in HYBRID_ARCHITECTURES:
            found.append(
                f"the target {target.path} ({target.architecture}) has recurrent layers (Mamba, linear attention), "
                "whose state DFLASH cannot take back to the accepted prefix; of such targets it serves "
                f"{', '.join(HYBRID_ARCHITECTURES)}."
            )
        if self.hidden_size != target.hidden_size:
            found.append(
                f"hidden_size={self.hidden_size} of {where} does not fit the target {target.path}, which has "
                f"hidden_size={target.hidden_size}: the drafter reads the target's embedding and hidden states."
            )
        if self.vocab_size != target.vocab_size:
            found.append(
                f"vocab_size={self.vocab_size} of {where} does not fit the target {target.path}, which has "
                f"vocab_size={target.vocab_size}: the drafter drafts the target's tokens."
            )
        if self.num_target_layers not in (None, target.num_layers):
            found.append(
                f"num_target_layers={self.num_target_layers} of {where} does not fit the target {target.path}, "
                f"which has num_hidden_layers={target.num_layers}."
            )
        # SGLang captures the input of layer id + 1, so it cannot capture the output of the last layer.
        bad = [i for i in self.target_layer_ids if not 0 <= i < target.num_layers - 1]
        if bad:
            # As the checkpoint writes them.
            field, first = ("aux_hidden_state_layer_ids", 1) if self.format == SPECULATORS else ("target_layer_ids", 0)
            found.append(
                f"{field}={[i + first for i in self.target_layer_ids]} of {where} names {[i + first for i in bad]}; "
                f"the target {target.path} has {target.num_layers} layers, of which {first} to "
                f"{target.num_layers - 2 + first} can be captured."
            )
        if not 0 <= self.mask_token_id < target.vocab_size:
            found.append(
                f"mask_token_id={self.mask_token_id} of {where} is not a token of the target "
                f"{target.path}, which has vocab_size={target.vocab_size}."
            )
        return found

    def check_attention_backend(self, backend: str, block_size: int, choices: tuple[str, ...]) -> None:
        """Raise :class:`ConfigError` naming the first layer whose mask the drafter's attention backend cannot draw.

        Args:
            backend: of the drafter.
            block_size: tokens of a served block, the largest distance of two of them.
            choices: the backends that the device has.
        """
        if backend in TWO_SIDED_BACKENDS:
            return
        for i, layer in enumerate(self.layers):
            if layer.window is not None and not layer.causal and layer.window < block_size:
                able = [choice for choice in choices if choice in TWO_SIDED_BACKENDS]
                raise ConfigError(
                    f"layer {i} of drafter {self.path} has a bidirectional sliding_window={layer.window}, narrower "
                    f"than the block of {block_size}: {backend} cannot limit what a row sees to its right; set "
                    f"--speculative-draft-attention-backend {' or '.join(able)}."
                )

    def check_tensor_parallel(self, tp_size: int) -> None:
        """Raise :class:`ConfigError` naming the field that cannot be spread over `tp_size` ranks."""
        sizes = {"num_attention_heads": self.num_attention_heads, "intermediate_size": self.intermediate_size}
        if self.pairs is not None and self.pairs.kind != MARKOV:
            sizes["selector_rank" if self.pairs.kind == SELECTOR else "markov_rank"] = self.pairs.rank
        # Fewer KV heads than ranks are replicated.
        if self.num_key_value_heads >= tp_size or tp_size % self.num_key_value_heads:
            sizes["num_key_value_heads"] = self.num_key_value_heads
        for field, size in sizes.items():
            if size % tp_size:
                raise ConfigError(f"{field}={size} of drafter {self.path} does not divide over --tp-size {tp_size}.")


@dataclass(frozen=True)
class TargetFacts:
    """Facts about a target that its drafter must agree with.

    Attributes:
        is_recurrent: bool. Whether some layers keep a state instead of KV.
    """

    path: str
    architecture: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    is_recurrent: bool

    @classmethod
    def from_dict(cls, config: dict[str, Any], path: str) -> TargetFacts:
        """Read a target's `config.json`. Multimodal targets describe their language model in `text_config`.

        Raises:
            ConfigError: a field that gives the target's size is missing.
        """
        text = config.get("text_config") or config
        if not isinstance(text, dict):
            raise ConfigError(f"text_config={text!r} in config.json of target {path}: expected an object.")
        for field in ("hidden_size", "vocab_size", "num_hidden_layers"):
            if not _is_int(text.get(field)):
                raise ConfigError(f"{field}={text.get(field)!r} in config.json of target {path}: expected an integer.")
        kinds = text.get("layer_types") or []
        if not isinstance(kinds, list):
            raise ConfigError(f"layer_types={kinds!r} in config.json of target {path}: expected a list.")
        return cls(
            path=path,
            architecture=(config.get("architectures") or ["of unknown architecture"])[0],
            hidden_size=text["hidden_size"],
            vocab_size=text["vocab_size"],
            num_layers=text["num_hidden_layers"],
            is_recurrent=not set(kinds) <= {"full_attention", "sliding_attention", "chunked_attention"},
        )


class _Reader:
    """Fields of a config. Newer checkpoints keep DFlash's own inside `dflash_config`, older ones next to it."""

    def __init__(self, config: dict[str, Any], path: str):
        self.config = config
        self.dflash = config["dflash_config"]
        self.path = path

    def error(self, field: str, value: object, expected: str) -> ConfigError:
        return ConfigError(f"{field}={value!r} in config.json of drafter {self.path}: expected {expected}.")

    def get(self, field: str) -> Any:
        value = self.dflash.get(field)
        return self.config.get(field) if value is None else value

    def positive_int(self, field: str) -> int:
        value = self.get(field)
        if not _is_int(value) or not 0 < value < 2**31:
            raise self.error(field, value, "a positive integer below 2**31")
        return value

    def positive_number(self, field: str, default: float | None) -> float | None:
        value = self.get(field)
        if value is None:
            return default
        if not is_positive_number(value):
            raise self.error(field, value, "a positive number")
        return float(value)

    def block_size(self) -> int:
        value = self.positive_int("block_size")
        if value < 2:
            raise self.error("block_size", value, "at least 2: the bonus token and one mask token")
        return value

    def flag(self, field: str) -> bool:
        value = self.get(field)
        if value is not None and not isinstance(value, bool):
            raise self.error(field, value, "true, false or nothing")
        return bool(value)

    def convolutions(self, hidden_size: int, draft_rows: int) -> Convolutions | None:
        found = self.sizes("conv_kernel_size", "conv_group_size")
        if found is None:
            return None
        taps, group_size = found
        if taps > draft_rows:
            raise self.error("conv_kernel_size", taps, f"at most the {draft_rows} rows of a block")
        if hidden_size % group_size:
            raise self.error("conv_group_size", group_size, f"a divisor of hidden_size={hidden_size}")
        return Convolutions(taps, group_size)

    def pairs(self, vocab_size: int) -> Pairs | None:
        selector, markov_rank = self.sizes("selector_rank", "selector_top_k"), self.get("markov_rank")
        if selector is not None:
            rank, num_candidates = selector
            if markov_rank:
                raise self.error("markov_rank", markov_rank, f"nothing with selector_rank={rank}")
            if not 2 <= num_candidates <= min(MAX_CANDIDATES, vocab_size):
                raise self.error("selector_top_k", num_candidates, f"2 to {MAX_CANDIDATES}, at most vocab_size")
            return Pairs(SELECTOR, rank, num_candidates)
        if markov_rank in (None, 0):
            return None
        # The names that checkpoints give them.
        kinds = {"vanilla": MARKOV, "gated": GATED}
        kind = self.get("markov_head_type") or "vanilla"
        if kind not in kinds:
            raise self.error("markov_head_type", kind, f"one of {', '.join(kinds)}")
        return Pairs(kinds[kind], self.positive_int("markov_rank"), min(MAX_CANDIDATES, vocab_size))

    def confidence_inputs(self, hidden_size: int, pairs: Pairs | None) -> int:
        if not self.flag("enable_confidence_head"):
            return 0
        if pairs is None:
            raise self.error("enable_confidence_head", True, "false without a Markov head (markov_rank=0)")
        return hidden_size + (pairs.rank if self.flag("confidence_head_with_markov") else 0)

    def sizes(self, first: str, second: str) -> tuple[int, int] | None:
        """Return two sizes that make a part; None: there is no such part."""
        if self.get(first) in (None, 0) and self.get(second) in (None, 0):
            return None
        return self.positive_int(first), self.positive_int(second)

    def heads(self) -> tuple[int, int]:
        heads, kv_heads = self.positive_int("num_attention_heads"), self.positive_int("num_key_value_heads")
        if heads % kv_heads:
            raise self.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}")
        return heads, kv_heads

    def mask_token_id(self) -> int:
        value = self.get("mask_token_id")
        if not _is_int(value):
            raise self.error("mask_token_id", value, "a token id")
        return value

    def draft_vocab_size(self, vocab_size: int) -> int | None:
        if self.config.get("draft_vocab_size") is None:
            return None
        value = self.positive_int("draft_vocab_size")
        if value > vocab_size:
            raise self.error("draft_vocab_size", value, f"at most vocab_size={vocab_size}")
        return value if value < vocab_size else None

    def target_layer_ids(self, num_layers: int, num_target_layers: int | None) -> tuple[int, ...]:
        ids = self.get("target_layer_ids")
        if ids is None:
            ids = default_target_layer_ids(num_layers, num_target_layers)
        if not _is_ascending(ids):
            raise self.error("target_layer_ids", ids, "ascending, distinct layer numbers")
        return tuple(ids)

    def layers(self, num_layers: int) -> tuple[LayerAttention, ...]:
        kinds = self.config["layer_types"]
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise self.error("layer_types", kinds, f"one entry for each of {num_layers} layers")
        is_causal = self.get("is_causal")
        # 0 equals False, but is not a bool.
        if is_causal is not None and not isinstance(is_causal, bool):
            raise self.error("is_causal", is_causal, "true, false or nothing")
        return tuple(self._layer(kind, is_causal) for kind in kinds)

    def _layer(self, kind: str, is_causal: bool | None) -> LayerAttention:
        if kind == "full_attention":
            return LayerAttention(window=None, causal=bool(is_causal))
        if kind == "sliding_attention":
            window = self.config.get("sliding_window")
            # SGLang counts the keys without the query, and takes 0 for no window (`RadixAttention`).
            if not _is_int(window) or not 2 <= window < 2**31:
                raise self.error("sliding_window", window, "2 or more, below 2**31, as layer_types has sliding layers")
            return LayerAttention(window=window, causal=is_causal is not False)
        raise self.error("layer_types", kind, "'full_attention' or 'sliding_attention'")


def is_positive_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_ascending(ids: object) -> bool:
    if not isinstance(ids, list | tuple) or not ids or not all(_is_int(i) for i in ids):
        return False
    return all(low < high for low, high in pairwise(ids))


def default_target_layer_ids(num_ids: int, num_target_layers: int) -> list[int]:
    """Return evenly spaced layers, as z-lab's reference does where a checkpoint names none."""
    if num_ids == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + i * span / (num_ids - 1)) for i in range(num_ids)]


def check_checkpoint_path(path: str | None) -> None:
    """Raise :class:`ConfigError` for a missing flag, and for a folder without a config.

    Repositories of the hub are checked when their config is read.
    """
    if not path:
        raise ConfigError(
            "--speculative-algorithm DFLASH needs a drafter: set --speculative-draft-model-path to a DFlash checkpoint."
        )
    looks_local = os.path.isabs(path) or path.startswith(".") or os.path.exists(path)
    if looks_local and not os.path.isfile(os.path.join(path, "config.json")):
        raise ConfigError(f"--speculative-draft-model-path {path}: there is no such checkpoint (no config.json in it).")


# Nodes of a tree: the ancestors of a node are bits of an int64.
MAX_NODES = 64
# A smaller tree is hardly different from a chain.
MIN_NODES = 4
# Candidates of a position: less probable tokens make no path that is worth a node.
MAX_CANDIDATES = 16
# Candidates of trees without a flag, and of chains. Sampled trees accept 1 to 6 % more than with 8, chains 1 to 2 %.
DEFAULT_CANDIDATES = 16


def resolve_tree(trained: int, dflash_block_size: int | None, num_draft_tokens: int | None) -> tuple[int, int]:
    """Return the block size and the nodes of a tree, where `--speculative-eagle-topk` is above 1.

    Args:
        trained: `block_size` of the checkpoint.
        dflash_block_size: `--speculative-dflash-block-size`; None: as trained.
        num_draft_tokens: `--speculative-num-draft-tokens`, the nodes with the bonus token; None: the block size.

    Raises:
        ConfigError: the drafter or a tree cannot have that size; names the flag and its value.
    """
    block_size = resolve_block_size(trained, dflash_block_size, None)
    num_nodes = block_size if num_draft_tokens is None else int(num_draft_tokens)
    if not MIN_NODES <= num_nodes <= MAX_NODES:
        subject = f"--speculative-num-draft-tokens {num_nodes}"
        if num_draft_tokens is None:
            subject = "the drafter's block_size" if dflash_block_size is None else "--speculative-dflash-block-size"
            subject += f" {num_nodes} without --speculative-num-draft-tokens"
        raise ConfigError(
            f"{subject}: with --speculative-eagle-topk the nodes of a tree, at least {MIN_NODES} and at most "
            f"{MAX_NODES}."
        )
    # No path is longer.
    return min(block_size, num_nodes), num_nodes


_AS_NODES = (
    f"With --speculative-eagle-topk {DEFAULT_CANDIDATES}, --speculative-num-draft-tokens is the number of nodes of a "
    "tree."
)


def resolve_block_size(trained: int, dflash_block_size: int | None, num_draft_tokens: int | None) -> int:
    """Return the block size of a server that verifies chains.

    Args:
        trained: `block_size` of the checkpoint.
        dflash_block_size: `--speculative-dflash-block-size`.
        num_draft_tokens: `--speculative-num-draft-tokens`, SGLang's general name of the same number.

    Raises:
        ConfigError: the flags contradict each other, or ask for a block that the drafter was not trained for.
    """
    flags = {
        "--speculative-dflash-block-size": dflash_block_size,
        "--speculative-num-draft-tokens": num_draft_tokens,
    }
    given = {flag: int(value) for flag, value in flags.items() if value is not None}
    if len(set(given.values())) > 1:
        raise ConfigError(
            " and ".join(f"{flag} {value}" for flag, value in given.items())
            + f" contradict each other: both set DFLASH's block size. {_AS_NODES}"
        )
    for flag, value in given.items():
        if not 2 <= value <= trained:
            raise ConfigError(
                f"{flag} {value}: the block size must be at least 2 (the bonus token and one draft token) and at "
                f"most {trained}, the block_size that the drafter was trained with. {_AS_NODES}"
            )
        return value
    return trained
