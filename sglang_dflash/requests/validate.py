"""Refuse requests that cannot be served, with a 400 that names the field. No field is ignored silently.

Clients of the HTTP server, of the native gRPC server and of an Engine get here. :mod:`sglang_dflash.requests.received`
checks what reaches the scheduler by any way.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import get_type_hints

import msgspec
import torch
from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import (
    EmbeddingReqInput,
    GenerateReqInput,
    SessionParams,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.runtime_context import get_observability
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from sglang_dflash.errors import ConfigError
from sglang_dflash.requests.stop_regex import check_stop_regex
from sglang_dflash.server_args.arguments import is_dflash, serves_dflash
from sglang_dflash.verify.failures import MAX_LOGIT

# Every field of `SamplingParams` is in one of these four groups. SGLang's scheduler and detokenizer act on these, with
# speculation and without:
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
# These decide which token comes next, so they must apply to every verified token:
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
# These ask for another decoding method:
REFUSED_PARAMS = ("beam_width", "watermark")
# SGLang sets these itself:
INTERNAL = ("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized")
# Fields of a request that ask for outputs that DFLASH does not collect.
REFUSED_OUTPUTS = ("return_routed_experts", "return_indexer_topk", "return_sampling_mask")
# Fields that ask for scores of some tokens of a prompt. SGLang ignores them with speculation.
REFUSED_POSITIONS = ("token_indices_to_pool", "multi_item_delimiter_indices")

# SGLang allocates the state of every answer when the request arrives, so that an n of millions would end the server. A
# request may ask for `FREE_N` answers per prompt, and for more if all of its answers are at most `MAX_ANSWERS`.
MAX_ANSWERS, FREE_N = 4096, 16

# Fields of a request that may be a list with one value per prompt.
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
# Largest values of fields that SGLang keeps in 32-bit and 64-bit tensors.
_LARGEST = {"top_k": 2**31 - 1, "sampling_seed": 2**63 - 1, "max_new_tokens": 2**63 - 1, "min_new_tokens": 2**63 - 1}
# SGLang divides by these, or compares with them, in float32.
_POSITIVE = ("temperature", "top_p", "repetition_penalty")
_FLOAT32 = torch.finfo(torch.float32)


def generate_request(
    original, manager: TokenizerManager, obj: GenerateReqInput | EmbeddingReqInput, *args, **kwargs
) -> AsyncIterator:
    """AROUND `TokenizerManager.generate_request`: check a request. SGLang answers a ValueError with a 400."""
    if is_dflash(manager.server_args) and isinstance(obj, GenerateReqInput):
        vocab_size = manager.model_config.vocab_size
        num_prompts, is_batch = check_prompts(obj, vocab_size, manager.model_config.hidden_size)
        params = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params or {}]
        watermarks = obj.watermark if isinstance(obj.watermark, list) else [obj.watermark]
        for each in [*params, *({"watermark": watermark} for watermark in watermarks)]:
            check_sampling_params(each, vocab_size)
        if obj.contains_mm_input() and mambaish_config(manager.model_config) is not None:
            raise ValueError("image, video and audio are not supported with DFLASH for a target with recurrent layers.")
        check_logprobs(obj, vocab_size)
        n = max((each.get("n") or 1 for each in params), default=1)
        if n > max(FREE_N, MAX_ANSWERS // num_prompts):
            raise ValueError(
                f"n={n} asks for {num_prompts * n} answers: a request may have at most {MAX_ANSWERS} answers."
            )
        check_positions(obj)
        check_lists(obj, num_prompts, is_batch or n > 1)
        check_objects(obj)
        if get_observability().enable_metrics:
            check_custom_labels(obj.custom_labels or {})
    return original(manager, obj, *args, **kwargs)


def check_logprobs(obj: GenerateReqInput | TokenizedGenerateReqInput, vocab_size: int) -> None:
    """Raise ValueError if a request asks for log probabilities that there are not."""
    _check_integers("top_logprobs_num", obj.top_logprobs_num, 0, vocab_size)
    _check_integers("token_ids_logprob", obj.token_ids_logprob, 0, vocab_size - 1)
    _check_integers("logprob_start_len", obj.logprob_start_len, -1, _LARGEST["max_new_tokens"])


def check_positions(obj: GenerateReqInput | TokenizedGenerateReqInput) -> None:
    """Raise ValueError if a request asks for scores of some tokens of its prompt."""
    for name in REFUSED_POSITIONS:
        if getattr(obj, name) is not None:
            raise ValueError(
                f"{name} is not supported with DFLASH: leave it out (of /v1/score, score_extraction_token) to get the "
                "scores of all tokens of a prompt."
            )


def check_prompts(obj: GenerateReqInput, vocab_size: int, hidden_size: int) -> tuple[int, bool]:
    """Return the number of prompts of a request, and True if they are a list.

    Raises:
        ValueError: for an empty list, and for tokens or embeddings that the model does not have.
    """
    # How many lists are nested in one prompt: none in text, one in token ids, two in embeddings.
    found = None
    for name, depth in (("text", 0), ("input_ids", 1), ("input_embeds", 2)):
        prompts = getattr(obj, name)
        if prompts is None:
            continue
        inner = prompts
        for _ in range(depth):
            inner = inner[0] if isinstance(inner, list) and inner else None
        is_batch = isinstance(inner, list)
        # An empty prompt of token ids may continue a session.
        if isinstance(prompts, list) and not prompts and name != "input_ids":
            raise ValueError(f"{name} is an empty list: give at least one prompt.")
        for prompt in prompts if is_batch else [prompts]:
            if name == "input_ids":
                _check_tokens(prompt, vocab_size)
            elif name == "input_embeds":
                check_embeddings(prompt, hidden_size)
        here = (len(prompts) if is_batch else 1), is_batch
        if found not in (None, here):
            raise ValueError(
                f"{name} is {_describe(*here)}, but text or input_ids is {_describe(*found)}: give as many of each."
            )
        found = here
    return found or (1, False)


def _describe(num_prompts: int, is_batch: bool) -> str:
    return f"a list of {num_prompts} prompts" if is_batch else "one prompt"


def _check_tokens(prompt: list, vocab_size: int) -> None:
    # SGLang would end such a request in the scheduler, but --log-requests decodes its tokens before.
    for token in prompt:
        if not (type(token) is int and 0 <= token < vocab_size):
            raise ValueError(not_a_token(token, vocab_size))


def not_a_token(token: object, vocab_size: int) -> str:
    """Return the message for an element of `input_ids` that is not a token of the model."""
    return f"input_ids has {token!r}, which is not a token of the model: give integers from 0 to {vocab_size - 1}."


def check_embeddings(prompt: list, hidden_size: int) -> None:
    """Raise ValueError for embeddings that the model does not have."""
    if not prompt:
        raise ValueError("input_embeds has a prompt without tokens: give at least one token.")
    for token in prompt:
        if not (isinstance(token, list) and len(token) == hidden_size):
            raise ValueError(
                f"input_embeds has a token that is not a list of {hidden_size} floats, the hidden size of the model."
            )


def check_lists(obj: GenerateReqInput, num_prompts: int, is_batch: bool) -> None:
    """Raise ValueError if a field is a list that does not have one value per prompt."""
    lists = {name: getattr(obj, name) for name in PER_PROMPT}
    tokens = obj.token_ids_logprob
    if isinstance(tokens, list) and any(not isinstance(value, int) for value in tokens):
        lists["token_ids_logprob"] = tokens
    for name, values in lists.items():
        if not isinstance(values, list):
            continue
        if not is_batch:
            raise ValueError(f"{name} is a list, but the request has one prompt and no list of them: give one value.")
        if len(values) != num_prompts:
            raise ValueError(f"{name} has {len(values)} values for {num_prompts} prompts: give one value per prompt.")
    if "token_ids_logprob" in lists and not all(value is None or isinstance(value, list) for value in tokens):
        raise ValueError("token_ids_logprob mixes lists and integers: give integers, or one list per prompt.")


def check_objects(obj: GenerateReqInput) -> None:
    """Raise ValueError if a field that SGLang does not check is not the object that it takes it for."""
    overrides = obj.positional_embed_overrides
    for each in overrides if isinstance(overrides, list) else [overrides]:
        if not (each is None or isinstance(each, PositionalEmbeds)):
            raise ValueError(f"positional_embed_overrides={each!r} is no tensor: only an Engine can take them.")
    _check_fields("session parameter", "session_params", obj.session_params or {}, _SESSION_TYPES)


def check_custom_labels(labels: dict[str, str]) -> None:
    """Raise ValueError for a label that the server's metrics do not have."""
    allowed = get_observability().tokenizer_metrics_allowed_custom_labels or []
    for label in labels:
        if label not in allowed:
            raise ValueError(
                f"Unknown label {label!r} in custom_labels: --tokenizer-metrics-allowed-custom-labels has "
                f"{', '.join(allowed) or 'none'}."
            )


def check_sampling_params(params: object, vocab_size: int) -> None:
    """Raise ValueError for a sampling parameter that SGLang would refuse too late, or not at all."""
    _check_fields("sampling parameter", "sampling_params", params, _TYPES)
    _check_values(params, vocab_size)
    if (params.get("watermark") or {"enabled": False}).get("enabled") is not False:
        raise ValueError("watermark is not supported with DFLASH.")


def check_read_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError for a value that :func:`check_sampling_params` refuses, and that a front end has let pass.

    Args:
        params: as SGLang keeps them. Their types are right, as they have been decoded.
    """
    # The scheduler gets a request for every answer, and does not read `n`. Front ends may leave it at 0.
    fields = {name: getattr(params, name) for name in _TYPES if name != "n"}
    _check_values(fields | {"stop_regex": params.stop_regex_strs}, vocab_size)
    if params.watermark is not None and params.watermark.enabled is not False:
        raise ValueError("watermark is not supported with DFLASH.")


def _check_values(params: dict, vocab_size: int) -> None:
    for name, value in params.items():
        # None means the default.
        if value is None:
            continue
        if name in _LARGEST and abs(value) > _LARGEST[name]:
            raise ValueError(f"{name}={value} is too large: the largest value is {_LARGEST[name]}.")
        if name in _POSITIVE and value > 0 and not _FLOAT32.tiny <= value <= _FLOAT32.max:
            raise ValueError(
                f"{name}={value} is not a normal float32: give a value from {_FLOAT32.tiny:.2g} to {_FLOAT32.max:.2g}."
            )
    if (params.get("beam_width") or 1) > 1:
        raise ValueError(f"beam_width={params['beam_width']} is not supported with DFLASH.")
    # SGLang compares it with numbers, so None is refused too.
    if "n" in params and (params["n"] or 0) < 1:
        raise ValueError(f"n={params['n']} asks for no answer: give 1 or more.")
    _check_integers("stop_token_ids", params.get("stop_token_ids"), 0, vocab_size - 1)
    for token, bias in (params.get("logit_bias") or {}).items():
        # -inf excludes a token.
        if not bias <= MAX_LOGIT:
            raise ValueError(f"logit_bias has {bias} for token {token}: the largest value is {MAX_LOGIT}.")
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


def _check_fields(kind: str, name: str, fields: object, types: dict) -> None:
    """Raise ValueError unless `fields` is an object with fields of these types; None means a field's default."""
    if not isinstance(fields, dict):
        raise ValueError(f"{name}={fields!r} is not an object: give an object of {kind}s.")
    unknown = sorted(str(field) for field in fields if field not in types)
    if unknown:
        raise ValueError(f"Unknown {kind} {unknown[0]!r}.")
    for field, value in fields.items():
        if value is None:
            continue
        try:
            msgspec.convert(value, types[field])
        except msgspec.ValidationError as error:
            raise ValueError(f"{field}={value!r}: {error}.") from error


def _check_integers(name: str, values: object, smallest: int, largest: int) -> None:
    """Raise ValueError unless `values` is an integer in a range or a list of them; None means the default."""
    if isinstance(values, list | tuple | set):
        for value in values:
            _check_integers(name, value, smallest, largest)
    elif values is not None and not (type(values) is int and smallest <= values <= largest):
        raise ValueError(f"{name} has {values!r}: give an integer from {smallest} to {largest}.")


def keep_embeddings_apart(original, adder: PrefillAdder, req: Req, *args, **kwargs) -> AddReqResult:
    """AROUND `PrefillAdder.add_one_req`: keep prompts of embeddings and of tokens in different batches."""
    others = adder.can_run_list
    if others and serves_dflash() and (others[0].input_embeds is None) != (req.input_embeds is None):
        return AddReqResult.OTHER
    return original(adder, req, *args, **kwargs)
