"""Counters and log probabilities of the tokens of an answer, without tokens that no client sees.

A cycle may accept tokens past the end of an answer, and under overlap scheduling a cycle may run for a request that has
ended. A request for no token has one drawn by its prefill.
"""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from sglang_dflash.server_args.arguments import serves_dflash

# Tokens in the answers of the batch whose result is being processed, before that.
_before: list[int] = []


def process_decode_result(original, processor, batch: ScheduleBatch, result) -> None:
    """AROUND `SchedulerBatchResultProcessor.process_batch_result_decode`: count the tokens in answers before it."""
    if not batch.spec_algorithm.is_dflash():
        original(processor, batch, result)
        return
    _before.append(_count(batch))
    try:
        original(processor, batch, result)
    finally:
        _before.pop()


def report_decode_stats(
    original, reporter, can_run_cuda_graph: bool, running_batch: ScheduleBatch, num_generated_tokens: int
) -> None:
    """AROUND `SchedulerMetricsReporter.report_decode_stats`: report the tokens that answers have gained.

    SGLang reports all accepted tokens, in `sglang:realtime_tokens_total` and in the throughput of its log and of
    `/server_info`.
    """
    if _before:
        num_gained = _count(running_batch) - _before[-1]
        reporter.num_generated_tokens -= num_generated_tokens - num_gained
        num_generated_tokens = num_gained
    original(reporter, can_run_cuda_graph, running_batch=running_batch, num_generated_tokens=num_generated_tokens)


def _count(batch: ScheduleBatch) -> int:
    return sum(len(req.output_ids) if req.finished_len is None else req.finished_len for req in batch.reqs)


def drop_logprobs_of_no_token(returned: None, processor, i: int, req: Req, *args, **kwargs) -> None:
    """AFTER `LogprobResultProcessor.add_logprob_return_values`: of a request for no token, drop that of a token.

    Without speculation SGLang draws no token for such a request (`Req.is_prefill_only`). The log probabilities of
    `token_ids_logprob` stay, as there: `/v1/score` reads them.
    """
    if req.sampling_params.max_new_tokens == 0 and serves_dflash():
        logprob = req.logprob
        for values in (
            logprob.output_token_logprobs_val,
            logprob.output_token_logprobs_idx,
            logprob.output_top_logprobs_val,
            logprob.output_top_logprobs_idx,
        ):
            values.clear()
