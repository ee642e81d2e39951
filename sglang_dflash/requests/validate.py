"""Requests that cannot be honoured: refused with a 400 that names the parameter, never silently ignored."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import get_type_hints

import msgspec
import torch
from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput, SessionParams
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from sglang_dflash.errors import ConfigError
from sglang_dflash.requests.stop_regex import check_stop_regex
from sglang_dflash.server_args.arguments import is_dflash, serves_dflash
from sglang_dflash.verify.failures import MAX_LOGIT

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
# Of scoring at some tokens of a prompt only; SGLang ignores them where there is speculation.
REFUSED_POSITIONS = ("token_indices_to_pool", "multi_item_delimiter_indices")

# SGLang makes every answer's state up front, so that an n of millions would end the server: a request may multiply its
# prompts by `FREE_N`, and by more up to so many answers.
MAX_ANSWERS, FREE_N = 4096, 16

# Fields of a request that may be a list with a value for each prompt.
PER_PROMPT = (
    "rid",
    "sampling_params",
    "watermark",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_sampling_mask",
    "sampling_logprobs_mode",
    "return_hidden_states",
    "custom_logit_processor",
    "lora_path",
    "lora_id",
    "extra_key",
    "cache_salt",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
    "kv_hints",
    "positional_embed_overrides",
)

_TYPES = {name: hint for name, hint in get_type_hints(SamplingParams).items() if name not in INTERNAL}
_SESSION_TYPES = get_type_hints(SessionParams)
# SGLang keeps these in tensors of 32 and 64 bits.
_LARGEST = {"top_k": 2**31 - 1, "sampling_seed": 2**63 - 1, "max_new_tokens": 2**63 - 1, "min_new_tokens": 2**63 - 1}
# And divides by these, or compares with them, in float32.
_POSITIVE = ("temperature", "top_p", "repetition_penalty")
_FLOAT32 = torch.finfo(torch.float32)


def generate_request(
    original, manager: TokenizerManager, obj: GenerateReqInput | EmbeddingReqInput, *args, **kwargs
) -> AsyncIterator:
    """AROUND `TokenizerManager.generate_request`, which answers with a 400 what raises a ValueError here."""
    if is_dflash(manager.server_args) and isinstance(obj, GenerateReqInput):
        num_prompts, is_batch = check_prompts(obj, manager.model_config.hidden_size)
        params = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params or {}]
        vocab_size = manager.model_config.vocab_size
        watermarks = obj.watermark if isinstance(obj.watermark, list) else [obj.watermark]
        for each in [*params, *({"watermark": watermark} for watermark in watermarks)]:
            check_sampling_params(each, vocab_size)
        if obj.contains_mm_input() and mambaish_config(manager.model_config) is not None:
            raise ValueError("image, video and audio are not supported with DFLASH and a target with recurrent layers.")
        _check_integers("top_logprobs_num", obj.top_logprobs_num, 0, vocab_size)
        _check_integers("token_ids_logprob", obj.token_ids_logprob, 0, vocab_size - 1)
        _check_integers("logprob_start_len", obj.logprob_start_len, -1, _LARGEST["max_new_tokens"])
        n = max((each.get("n") or 1 for each in params), default=1)
        if n > max(FREE_N, MAX_ANSWERS // num_prompts):
            raise ValueError(f"n={n}: this request asks for {num_prompts * n} answers; the most is {MAX_ANSWERS}.")
        for name in REFUSED_POSITIONS:
            if getattr(obj, name) is not None:
                raise ValueError(
                    f"{name} is not supported with DFLASH, where scores are of all tokens of a prompt, not of some "
                    "(score_extraction_token of /v1/score)."
                )
        check_lists(obj, num_prompts, is_batch or n > 1)
        check_objects(obj)
    return original(manager, obj, *args, **kwargs)


def check_prompts(obj: GenerateReqInput, hidden_size: int) -> tuple[int, bool]:
    """The number of prompts of a request that SGLang has not looked at yet, and whether it is a list of them.

    Raises:
        ValueError: for an empty list, or embeddings that the model does not have.
    """
    # Lists that one prompt is made of: text, token ids, embeddings of tokens.
    found = None
    for name, depth in (("text", 0), ("input_ids", 1), ("input_embeds", 2)):
        prompts = getattr(obj, name)
        if prompts is None:
            continue
        inner = prompts
        for _ in range(depth):
            inner = inner[0] if isinstance(inner, list) and inner else None
        is_batch = isinstance(inner, list)
        # Without tokens a prompt may still have those of its session.
        if isinstance(prompts, list) and not prompts and name != "input_ids":
            raise ValueError(f"{name} is an empty list.")
        if name == "input_embeds":
            for prompt in prompts if is_batch else [prompts]:
                _check_embeddings(prompt, hidden_size)
        here = (len(prompts) if is_batch else 1), is_batch
        if found not in (None, here):
            raise ValueError(f"{name} is of {here[0]} prompts, and text or input_ids of {found[0]}.")
        found = here
    return found or (1, False)


def _check_embeddings(prompt: list, hidden_size: int) -> None:
    if not prompt:
        raise ValueError("input_embeds has a prompt without tokens.")
    for token in prompt:
        if not (isinstance(token, list) and len(token) == hidden_size):
            raise ValueError(f"input_embeds has a token that is not a list of {hidden_size} floats.")


def check_lists(obj: GenerateReqInput, num_prompts: int, is_batch: bool) -> None:
    """Raise ValueError naming a field whose list does not have one value for each prompt."""
    lists = {name: getattr(obj, name) for name in PER_PROMPT}
    tokens = obj.token_ids_logprob
    if isinstance(tokens, list) and any(not isinstance(value, int) for value in tokens):
        lists["token_ids_logprob"] = tokens
    for name, values in lists.items():
        if not isinstance(values, list):
            continue
        if not is_batch:
            raise ValueError(f"{name} is a list of {len(values)}, and the request has one prompt and no list of them.")
        if len(values) != num_prompts:
            raise ValueError(f"{name} has {len(values)} values, and the request {num_prompts} prompts.")
    if "token_ids_logprob" in lists and not all(value is None or isinstance(value, list) for value in tokens):
        raise ValueError("token_ids_logprob has lists and integers side by side.")


def check_objects(obj: GenerateReqInput) -> None:
    """Raise ValueError naming a field that SGLang unpacks without a look at what it is."""
    overrides = obj.positional_embed_overrides
    for each in overrides if isinstance(overrides, list) else [overrides]:
        if not (each is None or isinstance(each, PositionalEmbeds)):
            raise ValueError(f"positional_embed_overrides={each!r}: only an Engine can be given tensors.")
    _check_fields("session_params", obj.session_params or {}, _SESSION_TYPES)


def check_sampling_params(params: object, vocab_size: int) -> None:
    """Raise ValueError naming a sampling parameter that SGLang would find fault with too late, or never."""
    _check_fields("sampling_params", params, _TYPES)
    for name, value in params.items():
        # None stands for the default.
        if value is None:
            continue
        if name in _LARGEST and abs(value) > _LARGEST[name]:
            raise ValueError(f"{name}={value} is beyond {_LARGEST[name]}.")
        if name in _POSITIVE and value > 0 and not _FLOAT32.tiny <= value <= _FLOAT32.max:
            raise ValueError(f"{name}={value} is beyond the range of float32.")
    if (params.get("beam_width") or 1) > 1:
        raise ValueError(f"beam_width={params['beam_width']} is not supported with DFLASH.")
    if (params.get("watermark") or {"enabled": False}).get("enabled") is not False:
        raise ValueError("watermark is not supported with DFLASH.")
    # SGLang compares it as it comes.
    if "n" in params and (params["n"] or 0) < 1:
        raise ValueError(f"n={params['n']}: at least one answer has to be asked for.")
    _check_integers("stop_token_ids", params.get("stop_token_ids"), 0, vocab_size - 1)
    for token, bias in (params.get("logit_bias") or {}).items():
        # -inf rules a token out.
        if not bias <= MAX_LOGIT:
            raise ValueError(f"logit_bias of token {token} is {bias}; the most is {MAX_LOGIT}.")
    patterns = params.get("stop_regex") or []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        check_stop_regex(pattern)


def check_preferred_params(result: None, server_args: ServerArgs) -> None:
    """AFTER `speculative_hook.handle_speculative_decoding`: check `--preferred-sampling-params`.

    SGLang adds them to requests that have been checked.

    Raises:
        ConfigError: DFLASH would refuse a request with them.
    """
    preferred = resolving_view(server_args).preferred_sampling_params
    if not is_dflash(server_args) or not preferred:
        return
    try:
        # SGLang parses it later.
        params = json.loads(preferred) if isinstance(preferred, str) else preferred
        check_sampling_params(params, model_config_of(server_args).vocab_size)
    except ValueError as error:
        raise ConfigError(f"--preferred-sampling-params {preferred}: {error}") from error


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
    return _malformed(req) or _not_supported(req)


def make_harmless(result: None, req: Req, *args, **kwargs) -> None:
    """AFTER `Req.set_finish_with_abort`: SGLang takes a refused request through one prefill step, which must not trip
    over what was wrong with it."""
    if not serves_dflash():
        return
    for name in REFUSED_OUTPUTS:
        setattr(req, name, False)
    req.custom_logit_processor = None
    req.sampling_params = SamplingParams(temperature=0, max_new_tokens=1)
    req.sampling_params.normalize(None)


def keep_embeddings_apart(original, adder: PrefillAdder, req: Req, *args, **kwargs) -> AddReqResult:
    """AROUND `PrefillAdder.add_one_req`: the prompts of a batch are embeddings, or they are tokens."""
    others = adder.can_run_list
    if others and serves_dflash() and (others[0].input_embeds is None) != (req.input_embeds is None):
        return AddReqResult.OTHER
    return original(adder, req, *args, **kwargs)


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
        unpacked = CustomLogitProcessor.from_str(processor)
    except Exception as error:  # A stranger's code may raise anything.
        return f"custom_logit_processor cannot be unpacked: {type(error).__name__}: {error}"
    if not callable(unpacked):
        return f"custom_logit_processor is a {type(unpacked).__name__}, which cannot be called with logits."
    return None


def _not_supported(req: Req) -> str | None:
    for name in REFUSED_OUTPUTS:
        if getattr(req, name):
            return f"{name}={getattr(req, name)!r} is not supported with DFLASH."
    return None
