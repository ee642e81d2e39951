"""Requests that cannot be honoured: refused with a 400 that names the parameter, never silently ignored."""

from __future__ import annotations

import pickle

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_params import SamplingParams

# Every field of `SamplingParams` is in one of these two groups. These are acted on by SGLang's scheduler and
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
    "stop_strs",
    "stop_regex_strs",
    "stop_str_max_len",
    "stop_regex_max_len",
    "is_normalized",
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
    "structural_tag",
)
# Fields of a request that ask for what DFLASH does not collect.
REFUSED_OUTPUTS = ("return_routed_experts", "return_indexer_topk")


def refuse_request(req: Req, enable_overlap: bool) -> str | None:
    """REPLACE `dflash_utils.validate_dflash_request`.

    Returns:
        the message of the 400, or None for a request that is served.
    """
    reason = _malformed(req) or _not_supported(req)
    if reason is not None:
        # SGLang takes a refused request through one prefill step, which must not trip over what was wrong with it.
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
    if params.max_new_tokens is not None and not isinstance(params.max_new_tokens, int):
        return f"max_new_tokens={params.max_new_tokens!r} is not an integer."
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
