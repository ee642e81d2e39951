"""Requests that DFLASH cannot honour yet: refused with a 400 that names the parameter, never silently ignored."""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

# Sampling parameters that change the target's distribution, with the value that leaves it alone. A request that asks
# for greedy decoding arrives with top_k == 1 (`SamplingParams.normalize`).
_NEUTRAL = SamplingParams()
_LOGIT_PARAMETERS = (
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


def refuse_request(req: Req, enable_overlap: bool) -> str | None:
    """REPLACE `dflash_utils.validate_dflash_request`.

    Returns:
        the message of the 400, or None for a request that is served.
    """
    params = req.sampling_params
    if params.top_k != 1:
        return (
            f"temperature={params.temperature}, top_k={params.top_k}: DFLASH decodes greedily for now; send "
            "temperature=0."
        )
    for name in _LOGIT_PARAMETERS:
        value = getattr(params, name)
        if value != getattr(_NEUTRAL, name):
            return f"{name}={value!r} is not supported with DFLASH yet."
    if req.return_logprob:
        return "return_logprob=True is not supported with DFLASH yet."
    if req.return_hidden_states:
        return "return_hidden_states=True is not supported with DFLASH yet."
    if req.custom_logit_processor is not None:
        return "custom_logit_processor is not supported with DFLASH yet."
    return None
