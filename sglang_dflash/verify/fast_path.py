"""Requests on the fast path: the decode cycle chooses their tokens itself, inside its CUDA graph.

A request is on the fast path if its next token is the argmax of the untouched logits, or a draw from their softmax
after temperature and filters, and if it asks for nothing but tokens. All other requests need SGLang's sampler
(`sampler.py`).
"""

from __future__ import annotations

from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_dflash.types import DrawParameters
from sglang_dflash.verify.penalties import are_penalised, is_penalised


def draws_by_plain_rules(sampler: Sampler) -> bool:
    """Return whether SGLang draws unseeded tokens by the rules of `reference.sample_rows.allowed_distribution`.

    Its "pytorch" backend does, but for equally likely tokens at a filter's edge: it keeps some of them, the rules all.
    """
    return (
        type(sampler) is Sampler
        and get_exec().kernel.sampling_backend in ("flashinfer", "pytorch")
        and sampler.rl_on_policy_target is None
    )


def draw_parameters(info: SamplingBatchInfo) -> DrawParameters | None:
    """Return the parameters of a batch's draws; None if all requests are greedy."""
    if info.is_all_greedy:
        return None
    return DrawParameters(info.temperatures.view(-1), info.top_ks, info.top_ps, info.min_ps)


def is_fast_batch(batch: ScheduleBatch, draws: bool) -> bool:
    """Return whether all requests of a batch are on the fast path, by what SGLang knows of the batch as a whole.

    It may be False although :func:`is_fast` is True for every request: for example where one request has `top_k` and
    `top_p`, and another has `min_p`.

    Args:
        draws: whether the cycle can draw tokens for this batch.
    """
    info = batch.sampling_info
    if batch.has_grammar or batch.return_logprob or info.has_custom_logit_processor:
        return False
    if are_penalised(info) or info.logit_bias is not None:
        return False
    has_all_filters = info.need_min_p_sampling and info.need_top_k_sampling and info.need_top_p_sampling
    return info.is_all_greedy or (draws and not has_all_filters)


def is_fast(req: Req, info: SamplingBatchInfo, draws: bool) -> bool:
    """Return whether a request is on the fast path.

    Args:
        info: of the request's batch.
        draws: whether the cycle can draw tokens for this batch.
    """
    params = req.sampling_params
    has_processor = info.has_custom_logit_processor and req.custom_logit_processor is not None
    if req.grammar is not None or req.return_logprob or has_processor:
        return False
    if is_penalised(params) or params.logit_bias is not None:
        return False
    # With all three filters, SGLang applies top_p to what top_k has left. The cycle applies them at once.
    has_all_filters = params.min_p > 0 and params.top_k != TOP_K_ALL and params.top_p != 1.0
    return params.top_k <= 1 or (draws and not has_all_filters)
