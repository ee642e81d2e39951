"""Acceptance and stage times of decode cycles, for `/server_info` and for Prometheus.

Shapes as in :mod:`sglang_dflash.types`: N verified tokens, K candidates.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from itertools import pairwise

import torch
from sglang.srt.runtime_context import get_observability, get_parallel, get_serving

from sglang_dflash import ops

STAGES = ("draft", "verify", "append")
# With `--enable-metrics`, the stages of every 8th cycle are timed.
TIMED_EVERY = 8

# Points of a cycle. Its stages lie between them.
BEGUN, DRAFTED, VERIFIED, APPENDED = range(len(STAGES) + 1)


class CycleClock:
    """Clock of the device that runs the cycles. A CUDA graph can read it too."""

    def __init__(self, device: torch.device, is_on: bool) -> None:
        self._times = torch.zeros(len(STAGES) + 1, dtype=torch.int64, device=device) if is_on else None

    def mark(self, point: int) -> None:
        """Note that the work launched so far brings the cycle to `point`."""
        if self._times is not None:
            ops.read_clock(self._times, point)

    def read(self) -> torch.Tensor:
        """Return the times of the last cycle's points, [4] int64 in ns, on their way to the CPU."""
        return self._times.to("cpu", non_blocking=True)


class CycleMetrics:
    """Verified blocks by accept length and, with `--enable-metrics`, seconds of sampled cycles by stage.

    Attributes:
        clock: is marked at every point of a cycle.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        # By accepted drafts, the bonus token not counted.
        self._blocks: Counter[int] = Counter()
        self._lengths: Counter[int] = Counter()
        self._ranks: Counter[int] = Counter()
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._cycle = 0
        # Times of the cycles whose results the scheduler has not read, in order; None: not timed.
        self._pending: deque[torch.Tensor | None] = deque()
        self._prometheus = _Prometheus(block_size) if _exports() else None
        self.clock = CycleClock(device, is_on=self.are_exported)

    @property
    def are_exported(self) -> bool:
        """Metrics are exported to Prometheus by this rank."""
        return self._prometheus is not None

    def end_cycle(self) -> None:
        """Note that a decode cycle has been launched."""
        if self._prometheus is None:
            return
        self._pending.append(self.clock.read() if self._cycle % TIMED_EVERY == 0 else None)
        self._cycle += 1

    def complete(self, num_correct_drafts: list[int], num_tokens: int, ranks: list[int]) -> None:
        """Count the oldest cycle that has not been counted.

        Args:
            num_correct_drafts: accepted drafts of each request, without the bonus tokens.
            num_tokens: N.
            ranks: accepted drafts of trees that were the first, second, ... candidate of their position; empty if they
                are not counted.
        """
        self._blocks.update(num_correct_drafts)
        self._lengths[num_tokens] += len(num_correct_drafts)
        if ranks:
            self._ranks.update(dict(enumerate(ranks)))
        if self._prometheus is None:
            return
        times = self._pending.popleft()
        seconds = {}
        if times is not None:
            # They are on the CPU: the scheduler has waited for the cycle's result, which was copied after them.
            stages = zip(STAGES, pairwise(times.tolist()), strict=True)
            seconds = {stage: (end - start) / 1e9 for stage, (start, end) in stages}
        for stage, value in seconds.items():
            self._seconds[stage] += value
        self._prometheus.add(num_correct_drafts, seconds, ranks)

    def snapshot(self) -> dict:
        """Return counts since the server started, for `/server_info`."""
        num_blocks = self._blocks.total()
        snapshot: dict = {"verified_blocks": num_blocks}
        if num_blocks:
            num_drafts = sum(correct * count for correct, count in self._blocks.items())
            snapshot["acceptance_length"] = 1 + num_drafts / num_blocks
            snapshot["blocks_by_verified_rows"] = dict(sorted(self._lengths.items()))
            # Share of the blocks that were verified that far.
            snapshot["acceptance_rate_by_position"] = [
                _over(self._blocks, position - 1) / max(1, _over(self._lengths, position))
                for position in range(1, self._block_size)
            ]
        if self._ranks:
            snapshot["accepted_drafts_by_rank"] = list(self._ranks.values())
        total = sum(self._seconds.values())
        if total:
            snapshot["time_share"] = {stage: seconds / total for stage, seconds in self._seconds.items()}
        return snapshot


@dataclass(frozen=True)
class AcceptedInTrees:
    """Accepted nodes and candidates of cycles with trees of one size.

    Attributes:
        nodes: [N]. Requests that accepted each node; of the root, all that had a tree.
        ranks: [K]. Accepted drafts that were the first, the second, ... candidate of their position.
        cycles: how many these are.
    """

    nodes: list[int]
    ranks: list[int]
    cycles: int


class TreeCounts:
    """Copies counts that the device sums up (`Verified.tree_counts`) to the host, for several cycles at once.

    A copy takes the host longer than most of its work for a cycle.
    """

    def __init__(self, num_candidates: int, every: int) -> None:
        """
        Args:
            num_candidates: K.
            every: most cycles with trees of one size between two copies.
        """
        self._num_candidates, self._every = num_candidates, every
        # Copies of the cycles whose results the scheduler has not read, in order; None: no copy.
        self._pending: deque[tuple[torch.Tensor, int] | None] = deque()
        # By the length of counts, which tells the size of trees: cycles since a copy, and the counts of that copy.
        self._cycles: Counter[int] = Counter()
        self._seen: dict[int, list[int]] = {}
        self._last = 0

    def end_cycle(self, counts: torch.Tensor | None) -> None:
        """Note that a decode cycle has been launched; `counts`: see `Verified.tree_counts`."""
        copy = None
        if counts is not None:
            size = len(counts)
            self._cycles[size] += 1
            # A size that is seldom verified is copied at once.
            if size != self._last or self._cycles[size] >= self._every:
                # The scheduler waits for work that is launched after this copy.
                copy = counts.to("cpu", non_blocking=True, copy=True), self._cycles.pop(size)
            self._last = size
        self._pending.append(copy)

    def complete(self) -> AcceptedInTrees | None:
        """Return what the oldest cycle and earlier ones have accepted; None: it comes with a later cycle."""
        copy = self._pending.popleft()
        if copy is None:
            return None
        counts, cycles = copy[0].tolist(), copy[1]
        seen = self._seen.get(len(counts), [0] * len(counts))
        self._seen[len(counts)] = counts
        new = [now - before for now, before in zip(counts, seen, strict=True)]
        return AcceptedInTrees(new[: -self._num_candidates], new[-self._num_candidates :], cycles)


def _over(counts: Counter[int], bound: int) -> int:
    return sum(count for n, count in counts.items() if n > bound)


def _exports() -> bool:
    """Return True if this rank exports metrics, by the rule of `SchedulerMetricsCollector`."""
    observability = get_observability()
    return observability.enable_metrics and (
        get_parallel().attn_tp_rank == 0 or observability.enable_metrics_for_all_schedulers
    )


class _Prometheus:
    def __init__(self, block_size: int) -> None:
        # Imported here: SGLang first sets up the directory that its processes share.
        from prometheus_client import Counter

        parallel = get_parallel()
        labels = {"model_name": get_serving().served_model_name, "tp_rank": parallel.tp_rank}
        if parallel.dp_rank is not None:
            labels["dp_rank"] = parallel.dp_rank
        labels |= get_observability().extra_metric_labels or {}
        blocks = Counter(
            "sglang_dflash:verified_blocks_total",
            "Verified blocks, by the number of tokens that each committed, its bonus token included.",
            [*labels, "accept_length"],
        )
        seconds = Counter(
            "sglang_dflash:stage_seconds_total",
            f"Seconds of every {TIMED_EVERY}th decode cycle, by stage: {', '.join(STAGES)}.",
            [*labels, "stage"],
        )
        self._drafts = Counter(
            "sglang_dflash:accepted_tree_drafts_total",
            "Accepted drafts of trees, by which candidate of its position each was: 1 is the most probable.",
            [*labels, "rank"],
        )
        self._labels = labels
        self._blocks = {n: blocks.labels(**labels, accept_length=n) for n in range(1, block_size + 1)}
        self._seconds = {stage: seconds.labels(**labels, stage=stage) for stage in STAGES}

    def add(self, num_correct_drafts: list[int], seconds: dict[str, float], ranks: list[int]) -> None:
        for correct, count in Counter(num_correct_drafts).items():
            self._blocks[correct + 1].inc(count)
        for rank, count in enumerate(ranks, start=1):
            self._drafts.labels(**self._labels, rank=rank).inc(count)
        for stage, value in seconds.items():
            self._seconds[stage].inc(value)
