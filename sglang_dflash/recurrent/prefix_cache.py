"""States that SGLang's prefix cache keeps, and which of them are valid."""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_spec


def can_cache_finished_request(
    original, processor: SchedulerBatchResultProcessor, req: Req, result: GenerationBatchResult, i: int
) -> bool:
    """AROUND `SchedulerBatchResultProcessor._mamba_can_cache_finished_req`: refuse a state of the wrong length.

    If a grammar ends inside a block, the tokens after its end are dropped on the CPU only. The GPU has advanced the
    state by them. If they reach a multiple of the track interval, the GPU has also written the state there to a track
    slot, which the scheduler does not know. A request with two track slots is safe: the scheduler looks in the other
    one. A request with one may have lost the state that the scheduler looks for.
    """
    track_slots, retained = req.kv.mamba_ping_pong_track_buffer, result.grammar_retained_tokens
    has_one = track_slots is not None and len(track_slots) == 1
    if has_one and get_spec().speculative_algorithm == "DFLASH" and retained is not None and retained[i] is not None:
        accepted = result.num_correct_drafts_per_req_cpu[i] + result.num_non_draft_tokens_per_req
        if len(retained[i]) < accepted:
            return False
    return original(processor, req, result, i)


def forget_prefill(batch: ScheduleBatch) -> None:
    """Remove from a decode batch where its prefill kept states, so that a cycle does not write there.

    The scheduler restores what a worker changes of a batch.
    """
    batch.mamba_track_indices = batch.mamba_track_mask = batch.mamba_track_seqlens = None
