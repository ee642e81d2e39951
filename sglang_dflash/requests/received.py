"""Refuse requests where they reach the scheduler, whichever way they came.

Front ends that tokenise requests themselves (SMG's gRPC servicer, the Rust server) do not pass
:mod:`sglang_dflash.requests.validate`. What would end the server is refused here again.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.requests.validate import (
    REFUSED_OUTPUTS,
    check_embeddings,
    check_logprobs,
    check_positions,
    check_read_params,
    not_a_token,
)
from sglang_dflash.server_args.arguments import serves_dflash

if TYPE_CHECKING:
    # It takes seconds to import, and only a scheduler process needs it.
    from sglang.srt.managers.scheduler import Scheduler

# What is wrong with the request that the scheduler is reading. Empty if nothing is.
_problems: list[str] = []


def handle_generate_request(original, scheduler: Scheduler, recv_req: TokenizedGenerateReqInput, **kwargs: Any) -> None:
    """AROUND `Scheduler.handle_generate_request`: check a request before SGLang makes a `Req` of it.

    A refused request goes on without the fields that are wrong, and :func:`refuse_request` ends it with the message.
    """
    if not scheduler.spec_algorithm.is_dflash():
        original(scheduler, recv_req, **kwargs)
        return
    try:
        _check(recv_req, scheduler)
    except ValueError as error:
        _problems.append(str(error))
        _reset(recv_req)
    try:
        original(scheduler, recv_req, **kwargs)
    finally:
        _problems.clear()


def _check(recv_req: TokenizedGenerateReqInput, scheduler: Scheduler) -> None:
    """Raise ValueError for a request that SGLang accepts and that would end the server."""
    model_config, params = scheduler.model_config, recv_req.sampling_params
    if not params.is_normalized:
        params.normalize(scheduler.tokenizer)
    if params.max_new_tokens == 0:
        # Before several answers (`n`) SGLang asks for no token after their prompt, and keeps the least length.
        params.min_new_tokens = 0
    params.verify(model_config.vocab_size)
    check_read_params(params, model_config.vocab_size)
    check_logprobs(recv_req, model_config.vocab_size)
    check_positions(recv_req)
    if recv_req.input_embeds is not None:
        check_embeddings(recv_req.input_embeds, model_config.hidden_size)
    elif recv_req.input_ids is None:
        raise ValueError("input_ids is missing: give at least one token.")
    if recv_req.mm_inputs is not None and mambaish_config(model_config) is not None:
        raise ValueError("image, video and audio are not supported with DFLASH for a target with recurrent layers.")


def _reset(recv_req: TokenizedGenerateReqInput) -> None:
    """Make a request harmless that is to be refused. A session does not get it."""
    recv_req.input_ids, recv_req.input_embeds = array("q", [0]), None
    recv_req.sampling_params = _plain_params()
    recv_req.return_logprob, recv_req.logprob_start_len, recv_req.top_logprobs_num = False, -1, 0
    for name in ("token_ids_logprob", "session_params", "positional_embed_overrides", "custom_logit_processor"):
        setattr(recv_req, name, None)
    recv_req.multi_item_delimiter_indices = recv_req.token_indices_to_pool = None


def _plain_params() -> SamplingParams:
    params = SamplingParams(temperature=0, max_new_tokens=1)
    params.normalize(None)
    return params


def refuse_request(req: Req, enable_overlap: bool) -> str | None:
    """REPLACE `dflash_utils.validate_dflash_request`.

    Returns:
        The message of the 400, or None if the request is served.
    """
    if _problems:
        return _problems[-1]
    return _malformed(req) or _not_supported(req)


def make_harmless(result: None, req: Req, *args, **kwargs) -> None:
    """AFTER `Req.set_finish_with_abort`: reset fields of a refused request.

    SGLang still runs one prefill for it, which would fail over the same fields.
    """
    if not serves_dflash():
        return
    for name in REFUSED_OUTPUTS:
        setattr(req, name, False)
    req.custom_logit_processor = None
    req.sampling_params = _plain_params()


def _malformed(req: Req) -> str | None:
    """Return the message for a request that SGLang accepts and that would end the server, else None."""
    ids = req.origin_input_ids
    if not ids:
        return "input_ids is empty: give at least one token."
    # Hashes of images, from an earlier turn of a session, are outside of the vocabulary.
    if req.multimodal_inputs is None:
        tokens = np.asarray(ids)
        outside = tokens[(tokens < 0) | (tokens >= req.vocab_size)]
        if outside.size:
            return not_a_token(int(outside[0]), req.vocab_size)
    params = req.sampling_params
    if params.min_p > 0 and get_exec().deterministic.enable_deterministic_inference:
        return f"min_p={params.min_p} is not supported with --enable-deterministic-inference: leave it out."
    if req.custom_logit_processor is not None:
        return _malformed_processor(req.custom_logit_processor)
    return None


def _malformed_processor(processor: str) -> str | None:
    try:
        unpacked = CustomLogitProcessor.from_str(processor)
    except Exception as error:  # The code of a client may raise anything.
        return f"custom_logit_processor cannot be unpacked: {type(error).__name__}: {error}"
    if not callable(unpacked):
        return f"custom_logit_processor is a {type(unpacked).__name__}: give a callable that takes logits."
    return None


def _not_supported(req: Req) -> str | None:
    for name in REFUSED_OUTPUTS:
        if getattr(req, name):
            return f"{name}={getattr(req, name)!r} is not supported with DFLASH."
    return None
