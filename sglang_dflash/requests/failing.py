"""Requests that fail while they are served end alone, with an error that says why. The rest of the batch goes on.

What failed is found where tokens are chosen (:mod:`sglang_dflash.verify.failures`). The request ends when the scheduler
reads the result, unless it has come to an end before.
"""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_dflash.requests import finishing
from sglang_dflash.verify.failures import Failures


def _failures(result: GenerationBatchResult) -> Failures | None:
    return next((ref for ref in result.extra_keep_alive_refs or () if isinstance(ref, Failures)), None)


def fail_prefilled(processor, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
    """BEFORE `SchedulerBatchResultProcessor.process_batch_result_prefill`: end requests that failed in a prefill."""
    if not batch.spec_algorithm.is_dflash():
        return
    failures = _failures(result)
    if failures is None:
        return
    for req, _, reason in failures.of_requests(batch.reqs):
        # The token after a middle chunk of a prompt is not used. A retracted request is prefilled again, and must not
        # end for the reason of this prefill.
        if req.inflight_middle_chunks <= 0 and not (req.finished() or req.is_retracted):
            req.discard_output_reason = reason


def fail_decoded(tokens: list[list[int]], processor, result: GenerationBatchResult, batch: ScheduleBatch) -> None:
    """AFTER `SchedulerBatchResultProcessor._resolve_spec_v2_tokens`: end requests that failed in a cycle."""
    if not batch.spec_algorithm.is_dflash():
        return
    failures = _failures(result)
    if failures is None:
        return
    for req, num_tokens, reason in failures.of_requests(batch.reqs):
        # A retracted request decodes these tokens again.
        if not (req.finished() or req.is_retracted):
            finishing.fail(req, num_tokens, reason)
