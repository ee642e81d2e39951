"""What a DFlash checkpoint says about itself, read once into a frozen object, and checked against its target.

Checkpoint format: z-lab's `config.json` (https://github.com/z-lab/dflash), a Qwen3 config with `block_size` and
`dflash_config`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

ARCHITECTURE = "DFlashDraftModel"


class ConfigError(ValueError):
    """A flag, config field or tensor that a user can correct; the message names it and its value."""


@dataclass(frozen=True)
class LayerAttention:
    """How one drafter layer masks.

    Attributes:
        window: a query at position p sees keys in (p - window, p], exactly `window` of them; None is unlimited.
        causal: whether a block row sees only the rows before it; False is bidirectional inside the block.
    """

    window: int | None
    causal: bool


@dataclass(frozen=True)
class DFlashConfig:
    """A DFlash drafter as its checkpoint describes it.

    Attributes:
        target_layer_ids: the target layers whose *output* is a context feature, in concatenation order
            (HF `hidden_states[id + 1]`).
        num_target_layers: layers of the target that the drafter was trained for.
        block_size: rows of one block: the bonus token and `block_size - 1` mask tokens.
        layers: the mask of every drafter layer.
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
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    layers: tuple[LayerAttention, ...]

    @property
    def window(self) -> int | None:
        """The one window size of the sliding layers, or None if every layer is full."""
        windows = {layer.window for layer in self.layers if layer.window is not None}
        return windows.pop() if windows else None

    @classmethod
    def from_dict(cls, config: dict[str, Any], path: str) -> DFlashConfig:
        """Read a z-lab style `config.json`.

        Args:
            config: the parsed file.
            path: where it came from, for messages.

        Raises:
            ConfigError: not a DFlash checkpoint, or a field is missing or makes no sense.
        """
        architectures = config.get("architectures") or []
        has_dflash = isinstance(config.get("dflash_config"), dict)
        if ARCHITECTURE not in architectures or not has_dflash:
            raise ConfigError(
                f"--speculative-draft-model-path {path} is not a DFlash checkpoint: its config.json has "
                f"architectures={architectures} and {'a' if has_dflash else 'no'} dflash_config; "
                f"expected architectures=['{ARCHITECTURE}'] and a dflash_config."
            )
        read = _Reader(config, path)
        num_layers = read.positive_int("num_hidden_layers")
        num_target_layers = read.positive_int("num_target_layers")
        num_heads, num_kv_heads = read.heads()
        return cls(
            path=path,
            hidden_size=read.positive_int("hidden_size"),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=read.positive_int("head_dim"),
            intermediate_size=read.positive_int("intermediate_size"),
            attention_bias=bool(config.get("attention_bias", False)),
            vocab_size=read.positive_int("vocab_size"),
            block_size=read.block_size(),
            mask_token_id=read.mask_token_id(),
            target_layer_ids=read.target_layer_ids(num_layers, num_target_layers),
            num_target_layers=num_target_layers,
            layers=read.layers(num_layers),
        )

    def check_target(self, target: TargetFacts) -> None:
        """Raise :class:`ConfigError` naming the first field that does not fit the target."""
        where = f"drafter {self.path}"
        if target.is_recurrent:
            raise ConfigError(
                f"the target {target.path} ({target.architecture}) has recurrent layers (Mamba, linear attention), "
                "whose state DFLASH cannot take back to the accepted prefix yet."
            )
        if self.hidden_size != target.hidden_size:
            raise ConfigError(
                f"hidden_size={self.hidden_size} of {where} does not fit the target {target.path}, which has "
                f"hidden_size={target.hidden_size}: the drafter reads the target's embedding and hidden states."
            )
        if self.vocab_size != target.vocab_size:
            raise ConfigError(
                f"vocab_size={self.vocab_size} of {where} does not fit the target {target.path}, which has "
                f"vocab_size={target.vocab_size}: the drafter drafts with the target's lm_head."
            )
        if self.num_target_layers != target.num_layers:
            raise ConfigError(
                f"num_target_layers={self.num_target_layers} of {where} does not fit the target {target.path}, "
                f"which has num_hidden_layers={target.num_layers}."
            )
        # SGLang captures the input of layer id + 1, so the output of the last layer is out of its reach.
        bad = [i for i in self.target_layer_ids if not 0 <= i < target.num_layers - 1]
        if bad:
            raise ConfigError(
                f"dflash_config.target_layer_ids={list(self.target_layer_ids)} of {where} names {bad}; the target "
                f"{target.path} has {target.num_layers} layers, of which 0 to {target.num_layers - 2} can be captured."
            )
        if not 0 <= self.mask_token_id < target.vocab_size:
            raise ConfigError(
                f"dflash_config.mask_token_id={self.mask_token_id} of {where} is not a token of the target "
                f"{target.path}, which has vocab_size={target.vocab_size}."
            )

    def check_tensor_parallel(self, tp_size: int) -> None:
        """Raise :class:`ConfigError` naming the field that cannot be spread over `tp_size` ranks."""
        sizes = {"num_attention_heads": self.num_attention_heads, "intermediate_size": self.intermediate_size}
        # Fewer KV heads than ranks are replicated.
        if self.num_key_value_heads >= tp_size or tp_size % self.num_key_value_heads:
            sizes["num_key_value_heads"] = self.num_key_value_heads
        for field, size in sizes.items():
            if size % tp_size:
                raise ConfigError(f"{field}={size} of drafter {self.path} does not divide over --tp-size {tp_size}.")


@dataclass(frozen=True)
class TargetFacts:
    """What a drafter must agree with.

    Attributes:
        is_recurrent: some layers keep a state instead of KV.
    """

    path: str
    architecture: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    is_recurrent: bool


class _Reader:
    def __init__(self, config: dict[str, Any], path: str):
        self.config = config
        self.dflash = config["dflash_config"]
        self.path = path

    def error(self, field: str, value: object, expected: str) -> ConfigError:
        return ConfigError(f"{field}={value!r} in config.json of drafter {self.path}: expected {expected}.")

    def positive_int(self, field: str) -> int:
        # Some checkpoints keep DFlash's own fields inside `dflash_config`.
        value = self.dflash.get(field, self.config.get(field))
        if not _is_int(value) or value <= 0:
            raise self.error(field, value, "a positive integer")
        return value

    def block_size(self) -> int:
        value = self.positive_int("block_size")
        if value < 2:
            raise self.error("block_size", value, "at least 2: the bonus token and one mask token")
        return value

    def heads(self) -> tuple[int, int]:
        heads, kv_heads = self.positive_int("num_attention_heads"), self.positive_int("num_key_value_heads")
        if heads % kv_heads:
            raise self.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}")
        return heads, kv_heads

    def mask_token_id(self) -> int:
        value = self.dflash.get("mask_token_id", self.config.get("mask_token_id"))
        if not _is_int(value):
            raise self.error("dflash_config.mask_token_id", value, "a token id")
        return value

    def target_layer_ids(self, num_layers: int, num_target_layers: int) -> tuple[int, ...]:
        ids = self.dflash.get("target_layer_ids")
        if ids is None:
            ids = default_target_layer_ids(num_layers, num_target_layers)
        if not _is_ascending(ids):
            raise self.error("dflash_config.target_layer_ids", ids, "ascending, distinct layer numbers")
        return tuple(ids)

    def layers(self, num_layers: int) -> tuple[LayerAttention, ...]:
        kinds = self.config.get("layer_types")
        if kinds is None or not self.config.get("use_sliding_window", True):
            kinds = ["full_attention"] * num_layers
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise self.error("layer_types", kinds, f"one entry for each of {num_layers} layers")
        is_causal = self.dflash.get("is_causal", self.config.get("is_causal"))
        if is_causal not in (None, True, False):
            raise self.error("is_causal", is_causal, "true, false or nothing")
        return tuple(self._layer(kind, is_causal) for kind in kinds)

    def _layer(self, kind: str, is_causal: bool | None) -> LayerAttention:
        if kind == "full_attention":
            return LayerAttention(window=None, causal=bool(is_causal))
        if kind == "sliding_attention":
            window = self.config.get("sliding_window")
            if not _is_int(window) or window <= 0:
                raise self.error("sliding_window", window, "a positive integer, as layer_types has sliding layers")
            if is_causal is False:
                raise self.error("is_causal", is_causal, "causal sliding layers; symmetric windows are not supported")
            return LayerAttention(window=window, causal=True)
        raise self.error("layer_types", kind, "'full_attention' or 'sliding_attention'")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_ascending(ids: object) -> bool:
    if not isinstance(ids, list | tuple) or not ids or not all(_is_int(i) for i in ids):
        return False
    return all(low < high for low, high in pairwise(ids))


def default_target_layer_ids(num_ids: int, num_target_layers: int) -> list[int]:
    """Evenly spaced layers, as z-lab's reference picks them where a checkpoint names none."""
    if num_ids == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + i * span / (num_ids - 1)) for i in range(num_ids)]


def check_checkpoint_path(path: str | None) -> None:
    """Raise :class:`ConfigError` where `--speculative-draft-model-path` can be seen to lead nowhere."""
    if not path:
        raise ConfigError(
            "--speculative-algorithm DFLASH needs a drafter: set --speculative-draft-model-path to a DFlash checkpoint."
        )
    looks_local = os.path.isabs(path) or path.startswith(".") or os.path.exists(path)
    if looks_local and not os.path.isfile(os.path.join(path, "config.json")):
        raise ConfigError(f"--speculative-draft-model-path {path}: there is no such checkpoint (no config.json in it).")


def resolve_block_size(trained: int, dflash_block_size: int | None, num_draft_tokens: int | None) -> int:
    """The block size to serve with.

    Args:
        trained: `block_size` of the checkpoint.
        dflash_block_size: `--speculative-dflash-block-size`.
        num_draft_tokens: `--speculative-num-draft-tokens`, SGLang's general name of the same number.

    Raises:
        ConfigError: the flags contradict each other, or ask for a block the drafter was not trained for.
    """
    flags = {
        "--speculative-dflash-block-size": dflash_block_size,
        "--speculative-num-draft-tokens": num_draft_tokens,
    }
    given = {flag: int(value) for flag, value in flags.items() if value is not None}
    if len(set(given.values())) > 1:
        raise ConfigError(
            " and ".join(f"{flag} {value}" for flag, value in given.items())
            + " contradict each other: both set DFLASH's block size."
        )
    for flag, value in given.items():
        if not 2 <= value <= trained:
            raise ConfigError(
                f"{flag} {value}: the block size must be at least 2 (the bonus token and one draft token) and at "
                f"most {trained}, the block_size that the drafter was trained with."
            )
        return value
    return trained
