"""Duration of a cycle by its draft length, where it has to be measured while the server runs.

On a GPU, CUDA graphs are timed at start-up (`engine.graphs.CycleGraphs`). :class:`MeasuredReplays` corrects these times
by those of replays while the server runs, and :class:`HostLatency` adds what the host needs. On a CPU,
:class:`MeasuredCost` times the cycles themselves.
Shapes: bs requests, N verified tokens of a request (the draft length).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

import torch

# Safety factor on the measured CPU cost of draft lengths above 1: these must win by more than the measurement error.
CPU_COST_MARGIN = 1.05
# What remains of the measured cost of a draft length after a cycle of another one, so that it is tried again.
STALE_COST_DECAY = 0.9995
# Weight of the newest cycle in the average cost of cycles of its kind.
NEWEST_WEIGHT = 0.2
# Replays of a draft length whose median duration counts, and the fewest that do.
REPLAY_SAMPLES, FEWEST_REPLAYS = 32, 3
# Durations of replays with one draft length differ by about this share, since texts choose different experts.
REPLAY_SPREAD = 0.1
# Measured cycles that the host's latency is an average of.
LATENCY_SAMPLES = 8


@dataclass
class _Average:
    """Moving average over cycles of one draft length and similar batch sizes."""

    bs: float
    seconds: float

    def add(self, bs: int, seconds: float) -> None:
        self.bs += NEWEST_WEIGHT * (bs - self.bs)
        self.seconds += NEWEST_WEIGHT * (_clip_outlier(seconds, self.seconds) - self.seconds)


class MeasuredCost:
    """Measured duration of cycles without a graph, on a CPU.

    Batch sizes are grouped by powers of two (:func:`_size_class`), with one average per group and draft length.
    Durations between two averages are interpolated, so that not every batch size has to be tried. The estimate of a
    draft length that is not tried decays slowly, because the machine may have been busy when it was measured.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        """
        Args:
            lengths: draft lengths to choose from, ascending.
        """
        self._lengths = tuple(lengths)
        self._has_begun: set[tuple[int, int]] = set()
        # By draft length, then by size class.
        self._averages: dict[int, dict[int, _Average]] = {length: {} for length in lengths}
        # Cycles so far, and the last cycle with each draft length.
        self._cycles, self._tried = 0, dict.fromkeys(lengths, 0)
        # Start of the last step, and the batch size and draft length of its cycle.
        self._begun, self._running = 0.0, None

    def begin_step(self, now: float, is_cycle: bool) -> None:
        """Note the start of a scheduler step. Time counts only between two cycles, where the server did nothing else.

        Args:
            now: seconds.
            is_cycle: the step is a decode cycle.
        """
        if self._running is not None and is_cycle:
            self._add(*self._running, now - self._begun)
        self._begun, self._running = now, None

    def begin_cycle(self, bs: int, length: int) -> None:
        """Note that this step is a cycle without a graph."""
        self._running = bs, length
        self._cycles += 1
        self._tried[length] = self._cycles

    def __call__(self, bs: int, length: int) -> float:
        """Return seconds of a cycle; 0 if nothing is known.

        The shortest untried draft length gets a lower bound, extrapolated from shorter ones. Longer ones have to wait:
        inf.
        """
        seconds = self._measured(bs, length)
        shorter = [other for other in self._lengths if other < length]
        if seconds is not None:
            margin = CPU_COST_MARGIN if shorter else 1.0
            return seconds * margin * STALE_COST_DECAY ** (self._cycles - self._tried[length])
        if not shorter:
            return 0.0
        known = [self._measured(bs, other) for other in shorter]
        if None in known:
            return math.inf
        seconds = known[-1]
        if len(shorter) > 1:
            slope = (seconds - known[-2]) / (shorter[-1] - shorter[-2])
            # The step from length 1 to the next one includes the drafter's forward: half of it is taken as the slope.
            seconds += max(0.0, slope) / (2 if len(shorter) == 2 else 1) * (length - shorter[-1])
        return seconds

    def _measured(self, bs: int, length: int) -> float | None:
        averages = sorted(self._averages[length].values(), key=lambda average: average.bs)
        # Extrapolation to batches beyond half or twice the tried sizes says little.
        if averages and averages[0].bs / 2 <= bs <= 2 * averages[-1].bs:
            return _interpolate(averages, bs)
        return None

    def _add(self, bs: int, length: int, seconds: float) -> None:
        """Add a cycle. The first of its kind is left out: it may allocate what later ones reuse."""
        size = _size_class(bs)
        if (size, length) in self._has_begun:
            self._averages[length].setdefault(size, _Average(bs, seconds)).add(bs, seconds)
        self._has_begun.add((size, length))


def _clip_outlier(seconds: float, usual: float) -> float:
    """Return at most twice the usual duration: a cycle with a pause in it does not count in full."""
    return min(seconds, 2 * usual)


def _size_class(bs: int) -> int:
    """Return the group of a batch size: 1, 2, 3 to 4, 5 to 8, 9 to 16 and so on."""
    return (bs - 1).bit_length()


def _interpolate(averages: Sequence[_Average], bs: int) -> float:
    """Return the seconds of a batch of `bs` requests.

    Args:
        averages: at least one, by ascending batch size.
    """
    nearest = min(averages, key=lambda average: abs(average.bs - bs))
    proportional = nearest.seconds * bs / nearest.bs
    if len(averages) == 1:
        return proportional
    i = min(max(1, bisect_left(averages, bs, key=lambda average: average.bs)), len(averages) - 1)
    a, b = averages[i - 1 : i + 1]
    seconds = a.seconds + (b.seconds - a.seconds) * (bs - a.bs) / (b.bs - a.bs)
    # More requests take longer, but not more than in proportion.
    return sorted((proportional, seconds, nearest.seconds))[1]


class MeasuredReplays:
    """Durations of replays while a server runs, as factors of those at start-up.

    At start-up requests have no contexts, and their tokens choose other experts of a mixture than those of real texts.
    Replays of Qwen3.5-35B-A3B's shape took 0.88 to 1.5 times as long
    (scripts/results/qwen3.5-35b-a3b-adaptive_h200_2026-11-27.md). A draft length of which few replays were timed counts
    as faster by the error of their median, so that it is not given up by chance. Batch sizes are grouped by powers of
    two (:func:`_size_class`).
    """

    def __init__(self) -> None:
        # By size class and draft length: the last factors, and their median if they are enough.
        self._samples: dict[tuple[int, int], deque[float]] = {}
        self._factors: dict[tuple[int, int], float] = {}

    def add(self, bs: int, length: int, factor: float) -> None:
        """Note that a replay took `factor` times as long as at start-up."""
        key = _size_class(bs), length
        samples = self._samples.setdefault(key, deque(maxlen=REPLAY_SAMPLES))
        samples.append(factor)
        if len(samples) >= FEWEST_REPLAYS:
            self._factors[key] = median(samples)

    def factor(self, bs: int, length: int) -> float:
        """Return the factor of a draft length: its own, else that of the most similar cycles, else 1."""
        size = _size_class(bs)
        if not self._factors:
            return 1.0
        nearest, count = (size, length), FEWEST_REPLAYS
        if nearest in self._factors:
            count = len(self._samples[nearest])
        else:
            nearest = min(
                self._factors, key=lambda key: (abs(key[0] - size), max(key[1], length) / min(key[1], length))
            )
        return self._factors[nearest] * (1 - REPLAY_SPREAD / math.sqrt(count))


class ReplayTimer:
    """Times some of the replays by CUDA events. The host never waits for one."""

    def __init__(self, steps_per_sample: int) -> None:
        """
        Args:
            steps_per_sample: replays of a draft length of which one is timed: events cost the host time.
        """
        self._steps_per_sample = steps_per_sample
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._replays = 0
        # By size class and draft length: the replay from which on another one is to be timed.
        self._due: dict[tuple[int, int], int] = {}
        self._has_begun = False
        # What the replay between the two events is, until its duration is read.
        self._timed: tuple[int, int, float] | None = None

    def begin(self, bs: int, length: int) -> None:
        """Note that a cycle of `bs` requests with this draft length is about to be replayed."""
        self._replays += 1
        self._has_begun = self._timed is None and self._replays >= self._due.get((_size_class(bs), length), 0)
        if self._has_begun:
            self._begin.record()

    def end(self, bs: int, length: int, expected: float) -> None:
        """Note that the replay has been launched.

        Args:
            expected: what :meth:`read` returns with its duration.
        """
        # A GPU that has waited for the launch would have waited in the measured time.
        if self._has_begun and not self._begin.query():
            self._end.record()
            self._timed = bs, length, expected
            self._due[_size_class(bs), length] = self._replays + self._steps_per_sample

    def read(self) -> tuple[int, int, float, float] | None:
        """Return bs, length, `expected` and the seconds of the timed replay; None: there is none, or it still runs."""
        if self._timed is None or not self._end.query():
            return None
        timed, self._timed = self._timed, None
        return *timed, self._begin.elapsed_time(self._end) / 1e3


class _LatencySamples:
    """Host latencies of the last measured cycles of one size class.

    Attributes:
        until_read: seconds from a launch until the host had the previous cycle's result, where it did not wait for it.
    """

    def __init__(self) -> None:
        self._host: deque[float] = deque(maxlen=LATENCY_SAMPLES)
        self.until_read: deque[float] = deque(maxlen=LATENCY_SAMPLES)
        # The host's latencies, ascending, and the sums of all but the first 0, 1, ... of them: `mean` is asked often.
        self._ascending: list[float] = []
        self._sums: list[float] = []

    def add(self, seconds: float) -> None:
        self._host.append(_clip_outlier(seconds, median(self._host)) if self._host else seconds)
        self._ascending = sorted(self._host)
        self._sums = [*accumulate(reversed(self._ascending), initial=0.0)][::-1]

    def mean(self, gpu_seconds: float) -> float:
        """Return the mean duration that these cycles would have had with this GPU time: the longer of both for each."""
        shorter = bisect_left(self._ascending, gpu_seconds)
        return (shorter * gpu_seconds + self._sums[shorter]) / len(self._ascending)


class HostLatency:
    """Time that the host needs from one cycle's launch to the next one's, without waiting for the GPU.

    Under overlap scheduling the host prepares a cycle while the previous one runs. With a small target the GPU finishes
    first, and verified tokens that fit into the host's time are free. Hosts are slow at times, and a cycle takes as
    long as the slower of both, so the mean over the last few cycles counts. Batch sizes are grouped by powers of two
    (:func:`_size_class`), because they change every few cycles.
    """

    def __init__(self, steps_per_sample: int) -> None:
        """
        Args:
            steps_per_sample: steps from one measured cycle to the next: measuring costs the host time too.
        """
        self._steps_per_sample = steps_per_sample
        self._samples: dict[int, _LatencySamples] = {}
        # Steps so far, and the step from which on another cycle is to be measured.
        self._steps, self._due = 0, 0
        # The measured cycle: its step, launch time and batch size.
        self._step, self._launched, self._bs = -2, 0.0, 0
        # When the host last had the result of a cycle.
        self._read = 0.0

    def begin_step(self) -> None:
        """Note the start of a scheduler step of any kind."""
        self._steps += 1

    @property
    def is_due(self) -> bool:
        """A cycle is to be measured, if the next step is a cycle too."""
        return self._steps >= self._due

    @property
    def is_measuring(self) -> bool:
        """The previous step launched a cycle that is measured."""
        return self._step == self._steps - 1

    def begin_cycle(self, now: float, bs: int) -> None:
        """Note that this step launched a cycle of `bs` requests at `now`, and does not wait for it."""
        self._step, self._launched, self._bs = self._steps, now, bs

    def read_result(self, now: float) -> None:
        """Note that the host has the result of a cycle."""
        self._read = now

    def end_cycle(self, now: float, has_gpu_waited: bool) -> None:
        """Note that this step launches a cycle too.

        Args:
            has_gpu_waited: the measured cycle ended before this launch.
        """
        seconds, until_read = now - self._launched, self._read - self._launched
        has_read = until_read > 0
        if not has_gpu_waited and not has_read:
            # The host waited for a prefill, and how long is unknown.
            return
        samples = self._samples.setdefault(_size_class(self._bs), _LatencySamples())
        if not has_gpu_waited:
            # The host waited for a result before it read it.
            seconds += (median(samples.until_read) if samples.until_read else 0.0) - until_read
        elif has_read:
            samples.until_read.append(until_read)
        samples.add(seconds)
        self._due = self._steps + self._steps_per_sample

    def seconds(self, bs: int, gpu_seconds: float) -> float:
        """Return the duration of a cycle that takes the GPU `gpu_seconds`."""
        if not self._samples:
            return gpu_seconds
        size = _size_class(bs)
        if size not in self._samples:
            size = min(self._samples, key=lambda other: abs(other - size))
        return self._samples[size].mean(gpu_seconds)
