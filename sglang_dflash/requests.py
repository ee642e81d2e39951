"""Requests that DFLASH cannot honour yet: refused with a 400 that names the parameter, never silently ignored."""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

_NEUTRAL = SamplingParams()

# Every field of `SamplingParams` is in one of these three groups. Under greedy decoding (top_k == 1, which is how
# `SamplingParams` keeps temperature 0) the argmax is the same whatever these say:
HARMLESS = ("temperature", "top_p", "min_p", "sampling_seed")
# These are acted on by SGLang's scheduler and detokenizer, whoever decodes:
HONOURED = (
    "top_k",
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
# These change the logits before the argmax:
REFUSED = (
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
# Fields of a request, rather than of its sampling parameters, that ask for more than tokens.
REFUSED_OUTPUTS = ("return_logprob", "return_hidden_states", "return_routed_experts", "return_indexer_topk")


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
    max_new_tokens = req.sampling_params.max_new_tokens
    if max_new_tokens is not None and not isinstance(max_new_tokens, int):
        return f"max_new_tokens={max_new_tokens!r} is not an integer."
    return None


def _not_supported(req: Req) -> str | None:
    params = req.sampling_params
    if params.top_k != 1:
        return f"temperature={params.temperature}: DFLASH decodes greedily for now; send temperature=0."
    for name in REFUSED:
        value = getattr(params, name)
        if name == "custom_params" and value is not None:
            # `Req` puts itself in here.
            value = {key: entry for key, entry in value.items() if key != "__req__"}
        if value != getattr(_NEUTRAL, name):
            return f"{name}={value!r} is not supported with DFLASH yet."
    for name in REFUSED_OUTPUTS:
        if getattr(req, name):
            return f"{name}={getattr(req, name)!r} is not supported with DFLASH yet."
    if req.custom_logit_processor is not None:
        return "custom_logit_processor is not supported with DFLASH yet."
    return None
