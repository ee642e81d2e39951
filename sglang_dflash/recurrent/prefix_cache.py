"""States that SGLang's prefix cache keeps, and which of them are valid."""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_spec

from sglang_dflash.recurrent.state import PendingCommit


def can_cache_finished_request(
    original, processor: SchedulerBatchResultProcessor, req: Req, result: GenerationBatchResult, i: int
) -> bool:
    """AROUND `SchedulerBatchResultProcessor._mamba_can_cache_finished_req`: keep or refuse the state of an answer.

    A block may go on after the end of an answer.

    * Where the state at the end of an answer is kept, and its commit waits for the scheduler, the state is made to stop
      where the answer does. Then it can be kept.
    * Where states are kept at multiples of the track interval, SGLang looks for the right one. It does not know of the
      tokens that a grammar drops on the CPU. The GPU has advanced the state by them, and if they reach a multiple, it
      has written the state there to a track slot. A request with two track slots is safe: the scheduler looks in the
      other one. A request with one may have lost the state that the scheduler looks for.
    """
    retained = None if result.grammar_retained_tokens is None else result.grammar_retained_tokens[i]
    pending = PendingCommit.of(result)
    if pending is not None:
        committed = _accepted(result, i) if retained is None else len(retained)
        num_tokens = req.owned_kv_len() - (req.kv.kv_committed_len - committed)
        # With --strip-thinking-cache only the prompt is kept, and the state is past it.
        if num_tokens > 0:
            pending.stop_at(i, num_tokens)
            return True
    track_slots = req.kv.mamba_ping_pong_track_buffer
    has_one = track_slots is not None and len(track_slots) == 1
    is_dflash = get_spec().speculative_algorithm == "DFLASH"
    if is_dflash and has_one and retained is not None and len(retained) < _accepted(result, i):
        return False
    return original(processor, req, result, i)


def _accepted(result: GenerationBatchResult, i: int) -> int:
    """Return the accepted tokens of the i-th request's block, with the bonus token."""
    return result.num_correct_drafts_per_req_cpu[i] + result.num_non_draft_tokens_per_req


def commit_after_result(returned: None, processor, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
    """AFTER `SchedulerBatchResultProcessor.process_batch_result_decode`: run the commit that has waited for it.

    Nothing has been written to a finished request's slot yet, whether the prefix cache has it or another request will.
    """
    pending = PendingCommit.of(result)
    if pending is not None:
        pending.run()


def forget_prefill(batch: ScheduleBatch) -> None:
    """Remove from a decode batch where its prefill kept states, so that a cycle does not write there.

    The scheduler restores what a worker changes of a batch.
    """
    batch.mamba_track_indices = batch.mamba_track_mask = batch.mamba_track_seqlens = None
