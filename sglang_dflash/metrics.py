"""How much of what was drafted is accepted, and where a cycle's time goes: for `/server_info` and for Prometheus."""

from __future__ import annotations

import time
from collections import Counter, deque
from itertools import pairwise

import torch
from sglang.srt.distributed.parallel_state_wrapper import ParallelState
from sglang.srt.server_args import ServerArgs

STAGES = ("draft", "verify", "append")

# Cycles between two whose stages are timed.
_TIMED_EVERY = 8


class CycleMetrics:
    """Counts of verified blocks by accept length and, with `--enable-metrics`, the seconds of sampled cycles by stage.

    A stage's seconds are the GPU's, between events on the forward stream; without a GPU they are the clock's.
    """

    def __init__(self, server_args: ServerArgs, ps: ParallelState, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._blocks: Counter[int] = Counter()
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._mark = _Event if torch.device(device).type == "cuda" else _Clock
        self._cycle = 0
        self._marks: list | None = None
        # Of the cycles that the scheduler has not seen the end of, in order.
        self._pending: deque[list | None] = deque()
        self._prometheus = _Prometheus(server_args, ps) if _exports(server_args, ps) else None

    def begin(self) -> None:
        """A decode cycle begins."""
        if self._prometheus is None:
            return
        self._marks = [self._mark()] if self._cycle % _TIMED_EVERY == 0 else None
        self._cycle += 1
        self._pending.append(self._marks)

    def mark(self) -> None:
        """The next stage of :data:`STAGES` has been launched."""
        if self._marks is not None:
            self._marks.append(self._mark())

    def complete(self, num_correct_drafts: list[int]) -> None:
        """The oldest cycle has ended: drafts accepted of each request, without the bonus tokens."""
        blocks = Counter(correct + 1 for correct in num_correct_drafts)
        self._blocks.update(blocks)
        if self._prometheus is None:
            return
        marks = self._pending.popleft()
        seconds = {}
        if marks is not None:
            stages = zip(STAGES, pairwise(marks), strict=True)
            seconds = {stage: start.seconds_to(end) for stage, (start, end) in stages}
        for stage, value in seconds.items():
            self._seconds[stage] += value
        self._prometheus.add(blocks, seconds)

    def snapshot(self) -> dict:
        """For `/server_info`: since the server started."""
        num_blocks = self._blocks.total()
        snapshot: dict = {"verified_blocks": num_blocks}
        if num_blocks:
            snapshot["acceptance_length"] = sum(n * count for n, count in self._blocks.items()) / num_blocks
            snapshot["acceptance_rate_by_position"] = [
                sum(count for n, count in self._blocks.items() if n > position) / num_blocks
                for position in range(1, self._block_size)
            ]
        total = sum(self._seconds.values())
        if total:
            snapshot["time_share"] = {stage: seconds / total for stage, seconds in self._seconds.items()}
        return snapshot


class _Event:
    """A point in the forward stream's work."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def seconds_to(self, later: _Event) -> float:
        return self._event.elapsed_time(later._event) / 1000


class _Clock:
    def __init__(self) -> None:
        self._time = time.perf_counter()

    def seconds_to(self, later: _Clock) -> float:
        return later._time - self._time


def _exports(server_args: ServerArgs, ps: ParallelState) -> bool:
    """As `SchedulerMetricsCollector` decides it."""
    return server_args.enable_metrics and (ps.attn_tp_rank == 0 or server_args.enable_metrics_for_all_schedulers)


class _Prometheus:
    def __init__(self, server_args: ServerArgs, ps: ParallelState) -> None:
        # Imported here: SGLang first sets up the directory that its processes share.
        from prometheus_client import Counter

        labels = {"model_name": server_args.served_model_name, "tp_rank": ps.tp_rank}
        if ps.dp_rank is not None:
            labels["dp_rank"] = ps.dp_rank
        labels |= server_args.extra_metric_labels or {}
        blocks = Counter(
            "sglang_dflash:verified_blocks_total",
            "Verified blocks, by the number of tokens that each committed, its bonus token included.",
            [*labels, "accept_length"],
        )
        seconds = Counter(
            "sglang_dflash:stage_seconds_total",
            f"Seconds of every {_TIMED_EVERY}th decode cycle, by stage: {', '.join(STAGES)}.",
            [*labels, "stage"],
        )
        block_size = server_args.speculative_num_draft_tokens
        self._blocks = {n: blocks.labels(**labels, accept_length=n) for n in range(1, block_size + 1)}
        self._seconds = {stage: seconds.labels(**labels, stage=stage) for stage in STAGES}

    def add(self, blocks: Counter[int], seconds: dict[str, float]) -> None:
        for accept_length, count in blocks.items():
            self._blocks[accept_length].inc(count)
        for stage, value in seconds.items():
            self._seconds[stage].inc(value)
