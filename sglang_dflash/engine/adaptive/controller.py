"""Choice of each decode cycle's draft length: fixed, on a GPU with CUDA graphs, or on a CPU.

Shapes: bs requests, N verified tokens of a request (the draft length).
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.runtime_context import get_parallel
from triton.testing import get_dram_gbps

from sglang_dflash.engine.adaptive.acceptance import AcceptanceModel
from sglang_dflash.engine.adaptive.cost import HostLatency, MeasuredCost, MeasuredReplays, ReplayTimer
from sglang_dflash.engine.graphs import CycleGraphs
from sglang_dflash.engine.metrics import AcceptedInTrees
from sglang_dflash.engine.relay import host_kv_lens

logger = logging.getLogger(__name__)

# Share of the cycles' time that exploration of longer drafts may lose, and that it may take.
EXPLORATION_LOSS, EXPLORATION_SHARE = 1 / 256, 1 / 8
# Share that counts of what a longer draft commits more: a shorter draft's next cycle commits a part of it too. Cycles
# of SmolLM2's drafter show 1.05 to 1.55 times of what a server gains by it (scripts/results/cycle_notes.md).
LONGER_SHARE = 0.85
# On a GPU, cycles that one choice is for, whose results are learned together, and of which the host measures one.
# Choosing, copying counts and measuring take longer than most of what the host does for a cycle.
CYCLES_PER_CHOICE = 16
# Least share of a graph's measured duration that its replays are taken to last. The time to read the KV cache, which is
# subtracted, is too long where layers have windows.
_MIN_FACTOR = 0.1


class DraftLengthController(Protocol):
    """Chooses the draft length of every cycle.

    The worker calls it in this order: `begin_step` at each step of the scheduler; in a decode cycle `choose`, then
    `before_replay` if a CUDA graph is replayed, then `launched`; `completed` when the scheduler has the cycle's result.
    Under overlap scheduling that is one step later.
    """

    def begin_step(self, is_cycle: bool) -> None:
        """Note the start of a scheduler step.

        Args:
            is_cycle: the step is a decode cycle.
        """

    def choose(self, batch: ScheduleBatch, fallback: Sequence[int]) -> int:
        """Return the draft length N of the next cycle.

        Args:
            batch: the cycle's requests.
            fallback: indices of those that need SGLang's sampler.
        """

    def before_replay(self, bs: int, length: int) -> None:
        """Note that the host is about to replay the cycle's graph.

        Args:
            bs: its requests.
            length: its draft length.
        """

    def launched(self, bs: int, length: int, is_timed: bool = False) -> None:
        """Note that the cycle has been launched.

        Args:
            bs: its requests.
            length: its draft length.
            is_timed: it is a replay that the host does not wait for, so that the host's latency can be measured.
        """

    def completed(self, num_correct_drafts: Sequence[int], in_trees: AcceptedInTrees | None) -> int:
        """Learn from the result of the oldest cycle that has not been completed.

        Args:
            num_correct_drafts: accepted drafts of each request, without the bonus tokens.
            in_trees: see :class:`AcceptanceModel`.

        Returns:
            The draft length of that cycle.
        """


class FixedLength(DraftLengthController):
    """Draft length without `--speculative-adaptive`."""

    def __init__(self, length: int) -> None:
        self._length = length

    def choose(self, batch: ScheduleBatch, fallback: Sequence[int]) -> int:
        return self._length

    def completed(self, num_correct_drafts: Sequence[int], in_trees: AcceptedInTrees | None) -> int:
        return self._length


class LengthChooser:
    """The draft length with the most expected tokens per second.

    Every tensor-parallel rank sees the same costs and the same results at the same cycles, and so chooses the same.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        cost: Callable[[int, int], float],
        acceptance: AcceptanceModel,
        cycles_per_choice: int = 1,
        common: int | None = None,
    ) -> None:
        """
        Args:
            lengths: draft lengths to choose from, ascending.
            cost: `cost(bs, length)`, the duration of a cycle in any unit, equal on every rank; 0: not known yet, to be
                tried, the shortest first; inf: cannot be chosen.
            acceptance: expected tokens by draft length.
            cycles_per_choice: cycles after which all choices are made again.
            common: the draft length that also serves batches without any graph; None: the longest.
        """
        self._lengths, self._cost, self._acceptance = tuple(lengths), cost, acceptance
        self._cycles_per_choice = cycles_per_choice
        self._common = self._lengths.index(self._lengths[-1] if common is None else common)
        # By batch size and requests that need SGLang's sampler: the draft length and the cost of its cycle.
        self._choices: dict[tuple[int, int], tuple[int, float]] = {}
        # Cycles since the choices were last dropped.
        self._cycles = 0
        # Cost of all cycles since the last exploration.
        self._since_exploration = 0.0
        # The cycles that have not been completed, in order: draft length and requests that needed SGLang's sampler.
        self._pending: deque[tuple[int, Sequence[int]]] = deque()

    def reuse_choice(self, bs: int, fallback: Sequence[int] = ()) -> int | None:
        """Return the draft length chosen for a recent cycle like this one; None: it has to be chosen."""
        choice = self._choices.get((bs, len(fallback)))
        if choice is None:
            return None
        self._begin(*choice, fallback)
        return choice[0]

    def choose(
        self,
        bs: int,
        fallback: Sequence[int] = (),
        extra: float = 0.0,
        latency: Callable[[int, float], float] | None = None,
    ) -> int:
        """Choose the draft length of the next cycle, of bs requests.

        Args:
            fallback: indices of the requests that need SGLang's sampler.
            extra: cost of the cycle that does not depend on the draft length.
            latency: `latency(bs, cost)`, the duration of a cycle that costs the device so much, the host included.
        """
        best, cost, explores = self._common, 0.0, False
        costs = [self._cost(bs, length) for length in self._lengths]
        if min(costs) < math.inf:
            costs = [known and known + extra for known in costs]
            if latency is not None:
                costs = [latency(bs, known) for known in costs]
            tokens = self._committed_tokens(len(fallback) / bs)
            rates = [count / known if known else math.inf for count, known in zip(tokens, costs, strict=True)]
            best = rates.index(max(rates))
            if costs[best]:
                # The value of a longer draft becomes known by verifying it.
                longer = next((i for i in range(best + 1, len(costs)) if costs[i] < math.inf), best)
                lost = costs[longer] * (1 - rates[longer] / rates[best])
                explores = longer > best and self._since_exploration >= max(
                    lost / EXPLORATION_LOSS, costs[longer] / EXPLORATION_SHARE
                )
                if explores:
                    best, self._since_exploration = longer, 0.0
            cost = 0.0 if explores else costs[best]
        length = self._lengths[best]
        if not explores:
            self._choices[bs, len(fallback)] = length, cost
        self._begin(length, cost, fallback)
        return length

    def _committed_tokens(self, fallback_share: float) -> list[float]:
        """Return the tokens per request and cycle of a server with each of the lengths."""
        expected = self._acceptance.expected_tokens(fallback_share)
        first, *others = (expected[length - 1] for length in self._lengths)
        more = [b - a for a, b in pairwise((first, *others))]
        # A cycle without drafts commits one token anywhere.
        return list(accumulate((first, *more[:1], *(LONGER_SHARE * tokens for tokens in more[1:]))))

    def _begin(self, length: int, cost: float, fallback: Sequence[int]) -> None:
        self._since_exploration += cost
        self._pending.append((length, fallback))
        self._cycles += 1
        if self._cycles >= self._cycles_per_choice:
            self._choices.clear()
            self._cycles = 0

    def completed(self, num_correct_drafts: Sequence[int], in_trees: AcceptedInTrees | None = None) -> int:
        """See :meth:`DraftLengthController.completed`."""
        length, fallback = self._pending.popleft()
        self._acceptance.learn(length, num_correct_drafts, fallback, in_trees)
        return length


def replay_factor(seconds: float, kv_seconds: float, cost: float) -> float:
    """Return the factor of a graph's duration at start-up that a replay lasted, without reading contexts.

    Args:
        seconds: duration of the replay.
        kv_seconds: time to read the contexts of its requests; an upper bound.
        cost: the graph's duration at start-up, in seconds.
    """
    return max(_MIN_FACTOR, (seconds - kv_seconds) / cost)


class GpuController(DraftLengthController):
    """Draft length on a GPU: durations of CUDA graphs, plus reading the KV cache, plus the host's latency.

    A single rank corrects the durations by those of its replays. Several ranks have to choose by the same, and keep
    those of the first rank at start-up.
    """

    def __init__(self, graphs: CycleGraphs, acceptance: AcceptanceModel, kv_bytes_per_token: float) -> None:
        """
        Args:
            graphs: captured and timed for every draft length.
            acceptance: expected tokens by draft length.
            kv_bytes_per_token: of target and drafter, on this rank.
        """
        self._graphs = graphs
        self._chooser = LengthChooser(graphs.lengths, self._cost, acceptance, CYCLES_PER_CHOICE, graphs.common_length)
        # Ranks hold parts of different sizes, and have to choose by the same cost.
        self._seconds_per_kv_token = from_first_rank(seconds_per_kv_token(kv_bytes_per_token))
        # Each rank has a host latency of its own, and all have to choose the same.
        is_alone = get_parallel().tp_group.world_size == 1
        self._latency = HostLatency(CYCLES_PER_CHOICE) if is_alone else None
        self._timer = ReplayTimer(CYCLES_PER_CHOICE) if is_alone else None
        self._measured = MeasuredReplays()
        # Time to read the contexts of the last batch that a draft length was chosen for.
        self._kv_seconds = 0.0
        # Launch of the last replay, and the end of the measured one.
        self._replayed_at, self._cycle_ended = 0.0, torch.cuda.Event()

    def begin_step(self, is_cycle: bool) -> None:
        if self._latency is not None:
            self._latency.begin_step()

    def choose(self, batch: ScheduleBatch, fallback: Sequence[int]) -> int:
        bs = self._graphs.padded(batch.batch_size())
        length = self._chooser.reuse_choice(bs, fallback)
        if length is not None:
            return length
        # Graphs were timed without contexts. Keys and values are read at the memory's bandwidth.
        if self._seconds_per_kv_token:
            num_tokens = int(host_kv_lens(batch, self._graphs.lengths[-1]).sum())
            self._kv_seconds = self._seconds_per_kv_token * num_tokens
        latency = None if self._latency is None else self._latency.seconds
        return self._chooser.choose(bs, fallback, self._kv_seconds, latency)

    def _cost(self, bs: int, length: int) -> float:
        return self._graphs.cost(bs, length) * self._measured.factor(bs, length)

    def before_replay(self, bs: int, length: int) -> None:
        self._replayed_at = time.perf_counter()
        if self._latency is not None and self._latency.is_measuring:
            self._latency.end_cycle(self._replayed_at, self._cycle_ended.query())
        if self._timer is not None:
            self._learn_duration()
            self._timer.begin(self._graphs.padded(bs), length)

    def _learn_duration(self) -> None:
        timed = self._timer.read()
        if timed is not None:
            bs, length, kv_seconds, seconds = timed
            self._measured.add(bs, length, replay_factor(seconds, kv_seconds, self._graphs.cost(bs, length)))

    def launched(self, bs: int, length: int, is_timed: bool = False) -> None:
        if not is_timed or self._latency is None:
            return
        bs = self._graphs.padded(bs)
        self._timer.end(bs, length, self._kv_seconds)
        # One cycle in several, because the event costs the host time too.
        if self._latency.is_due:
            self._latency.begin_cycle(self._replayed_at, bs)
            self._cycle_ended.record()

    def completed(self, num_correct_drafts: Sequence[int], in_trees: AcceptedInTrees | None) -> int:
        if self._latency is not None:
            self._latency.read_result(time.perf_counter())
        return self._chooser.completed(num_correct_drafts, in_trees)


class CpuController(DraftLengthController):
    """Draft length on a CPU: durations of the cycles themselves."""

    def __init__(self, lengths: Sequence[int], acceptance: AcceptanceModel) -> None:
        """
        Args:
            lengths: draft lengths to choose from, ascending.
            acceptance: expected tokens by draft length.
        """
        self._cost = MeasuredCost(lengths)
        self._chooser = LengthChooser(lengths, self._cost, acceptance)

    def begin_step(self, is_cycle: bool) -> None:
        self._cost.begin_step(from_first_rank(time.perf_counter()), is_cycle)

    def choose(self, batch: ScheduleBatch, fallback: Sequence[int]) -> int:
        return self._chooser.choose(batch.batch_size(), fallback)

    def launched(self, bs: int, length: int, is_timed: bool = False) -> None:
        self._cost.begin_cycle(bs, length)

    def completed(self, num_correct_drafts: Sequence[int], in_trees: AcceptedInTrees | None) -> int:
        return self._chooser.completed(num_correct_drafts, in_trees)


def seconds_per_kv_token(kv_bytes_per_token: float) -> float:
    """Return the time to read a token's KV at this GPU's memory bandwidth; 0 if the driver does not know it."""
    bandwidth = 1e9 * get_dram_gbps()
    if not bandwidth:
        logger.warning(
            "The driver reports no memory bandwidth for this GPU. --speculative-adaptive chooses draft lengths without "
            "the time to read the KV cache."
        )
        return 0.0
    return kv_bytes_per_token / bandwidth


def from_first_rank(seconds: float) -> float:
    """Return the value of the first tensor-parallel rank, so that all ranks choose by the same."""
    return get_parallel().tp_group.broadcast_object(seconds, src=0)
