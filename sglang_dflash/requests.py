"""Requests that cannot be honoured: refused with a 400 that names the parameter, never silently ignored."""

from __future__ import annotations

import pickle
import re
from collections.abc import AsyncIterator
from typing import get_type_hints

import msgspec
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput, SessionParams
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.arguments import is_dflash

# Every field of `SamplingParams` is in one of these four groups. These are acted on by SGLang's scheduler and
# detokenizer, whoever decodes:
BY_SGLANG = (
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "n",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "stream_interval",
)
# These decide which token follows, so they have to be honoured in every row of a block:
BY_SAMPLER = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "sampling_seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "logit_bias",
    "custom_params",
    "json_schema",
    "regex",
    "ebnf",
    "ebnf_full_assistant",
    "structural_tag",
)
# These ask for another way to decode:
REFUSED_PARAMS = ("beam_width", "watermark")
# These are no request's to set:
INTERNAL = ("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized")
# Fields of a request that ask for what DFLASH does not collect.
REFUSED_OUTPUTS = ("return_routed_experts", "return_indexer_topk", "return_sampling_mask")

# SGLang makes every answer's state up front, so that an n of millions would end the server: a request may multiply its
# prompts by `FREE_N`, and by more up to so many answers.
MAX_ANSWERS, FREE_N = 4096, 16

_SESSION_TYPES = get_type_hints(SessionParams)
_TYPES = {name: hint for name, hint in get_type_hints(SamplingParams).items() if name not in INTERNAL}
# SGLang keeps these in tensors of 32 and 64 bits.
_LARGEST = {"top_k": 2**31 - 1, "sampling_seed": 2**63 - 1, "max_new_tokens": 2**63 - 1, "min_new_tokens": 2**63 - 1}


def generate_request(
    original, manager: TokenizerManager, obj: GenerateReqInput | EmbeddingReqInput, *args, **kwargs
) -> AsyncIterator:
    """AROUND `TokenizerManager.generate_request`, which answers with a 400 what raises a ValueError here."""
    if is_dflash(manager.server_args) and isinstance(obj, GenerateReqInput):
        params = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params or {}]
        vocab_size = manager.model_config.vocab_size
        watermarks = obj.watermark if isinstance(obj.watermark, list) else [obj.watermark]
        for each in [*params, *({"watermark": watermark} for watermark in watermarks)]:
            check_sampling_params(each, vocab_size)
        _check_fields("session_params", obj.session_params or {}, _SESSION_TYPES)
        _check_integers("top_logprobs_num", obj.top_logprobs_num, 0, vocab_size)
        _check_integers("token_ids_logprob", obj.token_ids_logprob, 0, vocab_size - 1)
        _check_integers("logprob_start_len", obj.logprob_start_len, -1, _LARGEST["max_new_tokens"])
        num_prompts, n = _num_prompts(obj), max((each.get("n") or 1 for each in params), default=1)
        if n > max(FREE_N, MAX_ANSWERS // num_prompts):
            raise ValueError(f"n={n}: this request asks for {num_prompts * n} answers; the most is {MAX_ANSWERS}.")
    return original(manager, obj, *args, **kwargs)


def _num_prompts(obj: GenerateReqInput) -> int:
    """Of a request that SGLang has not looked at yet: it has one prompt, or a list of them."""
    # Lists that one prompt is made of: text, token ids, embeddings of tokens.
    for prompts, depth in ((obj.text, 0), (obj.input_ids, 1), (obj.input_embeds, 2)):
        if prompts is not None:
            inner = prompts
            for _ in range(depth):
                inner = inner[0] if isinstance(inner, list) and inner else None
            return max(len(prompts), 1) if isinstance(inner, list) else 1
    return 1


def check_sampling_params(params: object, vocab_size: int) -> None:
    """Raise ValueError naming a sampling parameter of the wrong type, which SGLang would find too late, or never."""
    _check_fields("sampling_params", params, _TYPES)
    for name, largest in _LARGEST.items():
        if abs(params.get(name) or 0) > largest:
            raise ValueError(f"{name}={params[name]} is beyond {largest}.")
    if (params.get("beam_width") or 1) > 1:
        raise ValueError(f"beam_width={params['beam_width']} is not supported with DFLASH.")
    if (params.get("watermark") or {"enabled": False}).get("enabled") is not False:
        raise ValueError("watermark is not supported with DFLASH.")
    if params.get("n") is not None and params["n"] < 1:
        raise ValueError(f"n={params['n']}: at least one answer has to be asked for.")
    if params.get("min_new_tokens"):
        # Until then their logits are -inf.
        _check_integers("stop_token_ids", params.get("stop_token_ids"), 0, vocab_size - 1)
    patterns = params.get("stop_regex") or []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"stop_regex={pattern!r} is not a regular expression: {error}.") from error


def _check_fields(name: str, fields: object, types: dict) -> None:
    """Raise ValueError unless this is an object with fields of these types; None stands for a field's default."""
    if not isinstance(fields, dict):
        raise ValueError(f"{name} is {fields!r}, not an object.")
    unknown = sorted(str(field) for field in fields if field not in types)
    if unknown:
        raise ValueError(f"{name} has {unknown[0]}, which is none of its fields.")
    for field, value in fields.items():
        if value is None:
            continue
        try:
            msgspec.convert(value, types[field])
        except msgspec.ValidationError as error:
            raise ValueError(f"{field}={value!r}: {error}.") from error


def _check_integers(name: str, values: object, smallest: int, largest: int) -> None:
    """Raise ValueError unless this is an integer in a range, or a list of such values; None stands for the default."""
    if isinstance(values, list | tuple | set):
        for value in values:
            _check_integers(name, value, smallest, largest)
    elif values is not None and not (type(values) is int and smallest <= values <= largest):
        raise ValueError(f"{name} has {values!r}, expected an integer from {smallest} to {largest}.")


def refuse_request(req: Req, enable_overlap: bool) -> str | None:
    """REPLACE `dflash_utils.validate_dflash_request`.

    Returns:
        the message of the 400, or None for a request that is served.
    """
    reason = _malformed(req) or _not_supported(req)
    if reason is not None:
        # SGLang takes a refused request through one prefill step, which must not trip over what was wrong with it.
        for name in REFUSED_OUTPUTS:
            setattr(req, name, False)
        req.custom_logit_processor = None
        req.sampling_params = SamplingParams(temperature=0, max_new_tokens=1)
        req.sampling_params.normalize(None)
    return reason


def _malformed(req: Req) -> str | None:
    """What SGLang lets through and then ends the whole server with."""
    ids = req.origin_input_ids
    if not ids:
        return "input_ids is empty."
    # Image tokens, here from an earlier turn of a session, are kept as hashes outside of the vocabulary.
    if req.multimodal_inputs is None and not (min(ids) >= 0 and max(ids) < req.vocab_size):
        outside = next(token for token in ids if not 0 <= token < req.vocab_size)
        return f"input_ids has {outside}, which is not a token of the model: its vocabulary has {req.vocab_size}."
    params = req.sampling_params
    if params.min_p > 0 and get_exec().deterministic.enable_deterministic_inference:
        return f"min_p={params.min_p} is not supported with --enable-deterministic-inference."
    if req.custom_logit_processor is not None:
        return _malformed_processor(req.custom_logit_processor)
    return None


def _malformed_processor(processor: str) -> str | None:
    try:
        CustomLogitProcessor.from_str(processor)
    except (ValueError, LookupError, TypeError, AttributeError, ImportError, EOFError, pickle.UnpicklingError) as error:
        return f"custom_logit_processor cannot be unpacked: {type(error).__name__}: {error}"
    return None


def _not_supported(req: Req) -> str | None:
    for name in REFUSED_OUTPUTS:
        if getattr(req, name):
            return f"{name}={getattr(req, name)!r} is not supported with DFLASH."
    return None
