"""Conversion of every checkpoint format to z-lab's `config.json`, in which transformers has nothing to guess.

Formats:
    z-lab (https://github.com/z-lab/dflash): a Qwen3 config with `dflash_config`. Older checkpoints keep `block_size`,
        `mask_token_id`, `target_layer_ids` and `is_causal` at the top, newer ones inside `dflash_config`.
    speculators (https://github.com/vllm-project/speculators): `speculators_model_type`, the layers' config nested in
        `transformer_layer_config`, and layer ids that count the embedding as 0.
    Muse: z-lab's fields in a config of its own class, and two tensors under other names.
    DeepSpec (https://github.com/deepseek-ai/DeepSpec): a copy of the target's config with the drafter's fields at the
        top. `block_size` counts drafts, as the bonus token's row predicts.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from transformers import CONFIG_MAPPING, PretrainedConfig, Qwen3Config

from sglang_dflash.checkpoint.config import ARCHITECTURE, DEEPSPEC, SPECULATORS, DFlashConfig, is_positive_number
from sglang_dflash.checkpoint.tensors import linear_shapes
from sglang_dflash.errors import ConfigError

# z-lab's architectures that have convolutions and a selector. The library cannot build them without.
_WITH_SELECTOR = ("DFlash2DraftModel", "DFlash2BeamDraftModel")
_ZLAB_ARCHITECTURES = (ARCHITECTURE, *_WITH_SELECTOR)
_DEEPSPEC_ARCHITECTURE = "Qwen3DSparkModel"
# The drafter that Muse Glimmer is published with, and the target's vocabulary, which its config leaves out.
_MUSE_ARCHITECTURE, _MUSE_VOCABULARY = "MuseGlimmerAssistantModel", 202048
# Defaults of fields by `speculators_model_type`, in z-lab's terms. speculators writes all fields, and vLLM's copies of
# the configs leave some out.
_OF_DFLASH = {"block_size": 8, "sample_from_anchor": False, "sliding_window_non_causal": False}
_SPECULATORS_DEFAULTS = {
    "dflash": _OF_DFLASH,
    "dflash2": _OF_DFLASH
    | {
        "sliding_window_non_causal": True,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
    "dspark": _OF_DFLASH
    | {
        "sample_from_anchor": True,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}
# Related drafters that are not served, and what identifies them.
_OTHER_ARCHITECTURES = {
    "DSparkDraftModel": "DSpark",
    "LingDSparkModel": "DSpark",
    "Gemma4DSparkModel": "DSpark of Gemma 4",
    "MiniMaxDFlash2DraftModel": "DFlash2 of MiniMax",
}
_OTHER_WORDS = {"Domino": "domino", "LiLiCoRR": "lilicorr", "XPress": "xpress"}
# Kinds of RoPE whose angles depend on the position only.
_ROPE_TYPES = ("default", "linear", "yarn", "llama3")


def read_config(path: str, revision: str | None = None) -> dict[str, Any]:
    """Read a checkpoint's `config.json`.

    Args:
        path: a local folder, or the name of a repository on the Hugging Face hub.
        revision: of the repository.

    Raises:
        OSError, ValueError: it cannot be read, or is no JSON object.
    """
    try:
        raw, _ = PretrainedConfig.get_config_dict(path, revision=revision)
    except OSError as error:
        if os.path.isdir(path):
            raise
        if isinstance(error.__cause__, HFValidationError):
            # Its message explains how to name a repository, which is not what the user meant.
            raise FileNotFoundError("there is no such folder, and no repository can have that name") from error
        raise OSError(f"there is no such folder, and as a repository: {error}") from error
    except TypeError as error:
        # transformers looks for fields in a number, or in null.
        raise ValueError("its config.json is no JSON object") from error
    if not isinstance(raw, dict):
        raise ValueError("its config.json is no JSON object")
    names = raw.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"architectures={names!r} in its config.json: expected a list of names")
    return raw


def is_dflash(raw: dict[str, Any]) -> bool:
    """Return whether a `config.json` is that of a DFlash drafter, in any format, and of no other drafter."""
    if _other_drafter(raw) is not None:
        return False
    if "speculators_model_type" in raw:
        return raw["speculators_model_type"] in _SPECULATORS_DEFAULTS
    names = _architectures(raw)
    is_zlab = not set(names).isdisjoint(_ZLAB_ARCHITECTURES) and isinstance(raw.get("dflash_config"), dict)
    return is_zlab or not {_DEEPSPEC_ARCHITECTURE, _MUSE_ARCHITECTURE}.isdisjoint(names)


def refuse_others(raw: dict[str, Any], path: str) -> None:
    """Raise :class:`ConfigError` unless :func:`is_dflash`, naming what the checkpoint is instead."""
    other = _other_drafter(raw)
    if other is not None:
        raise ConfigError(
            f"--speculative-draft-model-path {path} is not served by sglang-dflash: it is a checkpoint of {other} "
            f"(architectures={_architectures(raw)}); "
            "set it to a DFlash checkpoint."
        )
    if is_dflash(raw):
        return
    if "speculators_model_type" in raw:
        served = ", ".join(_SPECULATORS_DEFAULTS)
        found = f"speculators_model_type={raw['speculators_model_type']!r}; expected one of {served}."
    else:
        has_dflash = isinstance(raw.get("dflash_config"), dict)
        found = (
            f"architectures={_architectures(raw)} and {'a' if has_dflash else 'no'} dflash_config; "
            f"expected one of {', '.join(_ZLAB_ARCHITECTURES)} and a dflash_config, or {_DEEPSPEC_ARCHITECTURE}."
        )
    raise ConfigError(f"--speculative-draft-model-path {path} is not a DFlash checkpoint: its config.json has {found}")


def to_qwen3_config(raw: dict[str, Any], path: str) -> Qwen3Config:
    """Return the drafter's config as SGLang's Qwen3 layers and :meth:`DFlashConfig.from_dict` read it.

    Args:
        raw: the parsed `config.json` of a DFlash drafter, see :func:`is_dflash`.
        path: of the checkpoint, for messages.

    Raises:
        ConfigError: a field makes no sense.
    """
    if "speculators_model_type" in raw:
        fields = _from_speculators(raw, path)
    elif _DEEPSPEC_ARCHITECTURE in _architectures(raw):
        fields = _from_deepspec(raw, path)
    elif _MUSE_ARCHITECTURE in _architectures(raw):
        fields = _from_muse(raw)
    else:
        fields = _from_zlab(raw, path)
    _settle_quantization(fields, raw)
    _settle_windows(fields, path)
    # The layers are Qwen3's for every `model_type`. The class of that type knows the defaults of missing fields.
    model_type = fields.get("model_type") or Qwen3Config.model_type
    _check_fields(fields, path)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise _error("model_type", model_type, "a type that transformers knows", path)
    try:
        if model_type != Qwen3Config.model_type:
            fields = CONFIG_MAPPING[model_type].from_dict(fields).to_dict()
        config = Qwen3Config.from_dict(fields | {"model_type": Qwen3Config.model_type})
    except (KeyError, StrictDataclassError) as error:
        reason = error.args[0] if isinstance(error, KeyError) else " ".join(str(error).split())
        raise ConfigError(f"config.json of drafter {path}: {reason}") from error
    config._name_or_path = path
    _settle_rope(config, path)
    if fields["dflash_quantization"]:
        drafter = DFlashConfig.from_dict(config.to_dict(), path)
        config.quantization_config = drafter.quantization.to_sglang(linear_shapes(drafter))
    return config


def _check_fields(fields: dict[str, Any], path: str) -> None:
    """Raise :class:`ConfigError` for a field that transformers accepts and SGLang fails at, or ignores."""
    for name in ("dtype", "torch_dtype"):
        value = fields.get(name)
        known = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
        if value is not None and not isinstance(known, torch.dtype):
            raise _error(name, value, "the name of a dtype", path)
    if fields.get("hidden_act") not in (None, "silu"):
        raise _error("hidden_act", fields["hidden_act"], "'silu', as in Qwen3", path)


def check_overridden(config: PretrainedConfig, path: str) -> None:
    """Check the class and the RoPE of a drafter's config after `--json-model-override-args` has changed fields of it.

    Raises:
        ConfigError: they are not served any more.
    """
    if ARCHITECTURE not in (config.architectures or []):
        raise _error("architectures", config.architectures, [ARCHITECTURE], path)
    if not config.rope_parameters:
        raise _error("rope_scaling", config.rope_parameters, "a RoPE", path)
    _settle_rope(config, path)


def parse_drafter(
    original, parser, model, trust_remote_code: bool, revision: str | None = None, **kwargs
) -> PretrainedConfig:
    """AROUND `HfModelConfigParser.parse`, by which every part of SGLang opens a checkpoint."""
    raw, _ = PretrainedConfig.get_config_dict(model, revision=revision, **kwargs)
    if not isinstance(raw, dict) or not is_dflash(raw):
        return original(parser, model, trust_remote_code=trust_remote_code, revision=revision, **kwargs)
    return to_qwen3_config(raw, str(model))


def _architectures(raw: dict[str, Any]) -> list[str]:
    return raw.get("architectures") or []


def _other_drafter(raw: dict[str, Any]) -> str | None:
    """Return the name of a related drafter that is not served; None: it is none of them."""
    for name in _architectures(raw):
        if name in _OTHER_ARCHITECTURES:
            return _OTHER_ARCHITECTURES[name]
    dflash = raw.get("dflash_config")
    dflash = dflash if isinstance(dflash, dict) else {}
    projector = dflash.get("projector_type") or raw.get("projector_type")
    if projector == "dspark":
        return "DSpark"
    if dflash.get("attention_mode") or raw.get("attention_mode"):
        return "DFlash with latent attention (attention_mode)"
    words = [*_architectures(raw), raw.get("speculators_model_type"), projector, *raw, *dflash]
    words = [word.lower() for word in words if isinstance(word, str)]
    return next((other for other, mark in _OTHER_WORDS.items() if any(mark in word for word in words)), None)


def _from_zlab(raw: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a copy of z-lab's fields, under the one architecture that this package registers."""
    if not set(_architectures(raw)).isdisjoint(_WITH_SELECTOR):
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            if not (raw["dflash_config"].get(name) or raw.get(name)):
                raise _error(name, None, f"a positive integer, as {_architectures(raw)[0]} has that part", path)
    return raw | {
        "architectures": [ARCHITECTURE],
        "dflash_names_outputs": not set(_architectures(raw)).isdisjoint(_WITH_SELECTOR),
        "dflash_config": dict(raw["dflash_config"]),
    }


def _from_muse(raw: dict[str, Any]) -> dict[str, Any]:
    """Return z-lab's fields of the config of Muse's drafter, whose layers see the whole block."""
    dflash = raw.get("dflash_config")
    return raw | {
        "architectures": [ARCHITECTURE],
        "dflash_names_outputs": True,
        "model_type": Qwen3Config.model_type,
        "vocab_size": raw.get("vocab_size") or _MUSE_VOCABULARY,
        "is_causal": raw.get("is_causal", False),
        "dflash_config": dict(dflash) if isinstance(dflash, dict) else {},
    }


def _from_speculators(raw: dict[str, Any], path: str) -> dict[str, Any]:
    """Return z-lab's fields of a speculators config."""
    layers = raw.get("transformer_layer_config")
    if not isinstance(layers, dict):
        raise _error("transformer_layer_config", layers, "the config of the drafter's layers", path)
    own = {
        name: default if raw.get(name) is None else raw[name]
        for name, default in _SPECULATORS_DEFAULTS[raw["speculators_model_type"]].items()
    }
    is_two_sided = own.pop("sliding_window_non_causal")
    if not isinstance(is_two_sided, bool):
        raise _error("sliding_window_non_causal", is_two_sided, "true or false", path)
    ids = raw.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise _error("aux_hidden_state_layer_ids", ids, "layer numbers, the embedding being 0", path)
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    return layers | {
        "architectures": [ARCHITECTURE],
        "dflash_format": SPECULATORS,
        "draft_vocab_size": raw.get("draft_vocab_size"),
        "target_hidden_size": raw.get("target_hidden_size"),
        # Full layers are bidirectional in any case.
        "is_causal": False if is_two_sided else None,
        "dflash_config": own
        | {
            "mask_token_id": raw.get("mask_token_id"),
            "target_layer_ids": [i - 1 for i in ids],
        },
        **({"dtype": dtype} if dtype else {}),
    }


def _from_deepspec(raw: dict[str, Any], path: str) -> dict[str, Any]:
    """Return z-lab's fields of a DeepSpec config. Its bonus token's row always predicts."""
    for name, served in (("sample_from_anchor", True), ("has_embed_tokens", False)):
        if raw.get(name) not in (None, served):
            raise _error(name, raw[name], f"{str(served).lower()} or nothing", path)
    own = {
        name: raw.get(name)
        for name in (
            "block_size",
            "mask_token_id",
            "target_layer_ids",
            "markov_rank",
            "markov_head_type",
            "enable_confidence_head",
            "confidence_head_with_markov",
        )
    }
    # z-lab's library chooses layers where none are named. DeepSpec's does not.
    if own["target_layer_ids"] is None:
        raise _error("target_layer_ids", None, "ascending, distinct layer numbers", path)
    return raw | {
        "architectures": [ARCHITECTURE],
        "dflash_format": DEEPSPEC,
        "dflash_config": own | {"sample_from_anchor": True},
    }


def _settle_quantization(fields: dict[str, Any], raw: dict[str, Any]) -> None:
    """Move the checkpoint's `quantization_config` to `dflash_quantization`.

    SGLang gets one that names the drafter's layers as SGLang does. compressed-tensors had another name for the field.
    """
    names = ("quantization_config", "compression_config")
    found = [place[name] for place in (raw, fields) for name in names if place.get(name)]
    for name in names:
        fields.pop(name, None)
    fields["dflash_quantization"] = found[0] if found else None


def _settle_windows(fields: dict[str, Any], path: str) -> None:
    """Set `layer_types` and `use_sliding_window`, so that transformers keeps the windows that the config means.

    transformers drops `sliding_window` unless `use_sliding_window` is true. A DFlash config may have `layer_types`
    without that switch, or call the switch `use_swa`.
    """
    dflash = fields["dflash_config"]
    switches = {
        f"{prefix}{name}": place[name]
        for prefix, place in (("", fields), ("dflash_config.", dflash))
        for name in ("use_sliding_window", "use_swa")
        if place.get(name) is not None
    }
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise _error(name, value, "true or false", path)
    if len(set(switches.values())) > 1:
        raise _error(", ".join(switches), list(switches.values()), "the same value", path)
    for name in ("layer_types", "sliding_window", "max_window_layers"):
        if dflash.get(name) is not None:
            fields[name] = dflash[name]
    # transformers' default is 4096.
    fields.setdefault("sliding_window", None)
    if False in switches.values():
        fields |= {"use_sliding_window": False, "layer_types": None}
        return
    if fields.get("layer_types") is not None:
        fields["use_sliding_window"] = True
        return
    # Without layer_types, transformers lets the layers from max_window_layers on slide.
    if True in switches.values() and "use_sliding_window" not in fields and "max_window_layers" not in fields:
        raise _error("layer_types", None, f"the sliding layers, as {next(iter(switches))} is true", path)
    fields["use_sliding_window"] = True in switches.values()


def _settle_rope(config: Qwen3Config, path: str) -> None:
    rope = config.rope_parameters
    if any(isinstance(value, dict) for value in rope.values()):
        raise _error("rope_parameters", rope, "one RoPE for all layers", path)
    rope_dim = rope.pop("rope_dim", None)
    if rope_dim is not None:
        if rope_dim != config.head_dim:
            raise _error("rope_parameters.rope_dim", rope_dim, f"head_dim={config.head_dim}, as in Qwen3", path)
        # Copies of the target's fields. `rope_dim` says what the drafter has.
        for name in ("partial_rotary_factor", "mrope_section", "mrope_interleaved"):
            rope.pop(name, None)
    if rope["rope_type"] not in _ROPE_TYPES:
        raise _error("rope_parameters.rope_type", rope["rope_type"], f"one of {', '.join(_ROPE_TYPES)}", path)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _error("partial_rotary_factor", rope["partial_rotary_factor"], "1.0, as in Qwen3", path)
    for name, value in rope.items():
        is_number = name.endswith(
            ("rope_theta", "factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
        )
        if is_number and value is not None and not is_positive_number(value):
            raise _error(f"rope_parameters.{name}", value, "a positive number", path)
    attention_factor = rope.get("attention_factor")
    if rope["rope_type"] == "yarn" and attention_factor is not None:
        # SGLang does not read it: it multiplies its own default by `attn_factor`.
        own = _yarn_scale(rope["factor"], 1)
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            own = _yarn_scale(rope["factor"], rope["mscale"]) / _yarn_scale(rope["factor"], rope["mscale_all_dim"])
        rope["attn_factor"] = attention_factor / own


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _error(field: str, value: object, expected: str, path: str) -> ConfigError:
    return ConfigError(f"{field}={value!r} in config.json of drafter {path}: expected {expected}.")
