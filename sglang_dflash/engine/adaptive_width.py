"""`--speculative-adaptive`: how many rows of a request the target verifies, chosen anew for every cycle.

A drafter proposes all tokens of a block at once, and few of the last ones are ever accepted. They cost nothing while
the GPU waits for weights anyway; once a batch is large enough to keep it computing, each token costs its share, and in
a mixture of experts each reads weights of its own. A drafter drafts the first tokens of a block as well without the
last ones (scripts/results/cycle_notes.md), so they are left out of its forward too. One row is plain decoding, without
the drafter's forward.

Shapes: the target verifies W rows of each request: the bonus token and W - 1 drafts, in a chain or in a tree, of which
smaller ones are the beginnings.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from statistics import median
from typing import Protocol

from sglang_dflash.settings import SETTINGS


def chain_widths(block_size: int) -> tuple[int, ...]:
    """What is chosen from: one row, and quarters of a block, as each takes CUDA graphs of its own."""
    return tuple(sorted({1} | {max(2, -(-block_size * quarters // 4)) for quarters in (1, 2, 3, 4)}))


def tree_widths(num_nodes: int) -> tuple[int, ...]:
    """What is chosen from: one row, and trees of half as many nodes as the next."""
    widths = [num_nodes]
    while widths[-1] >= 8:
        widths.append(widths[-1] // 2)
    return (1, *reversed(widths))


def verify_widths(num_rows: int, is_adaptive: bool, has_trees: bool) -> tuple[int, ...]:
    """What a server chooses from, ascending: without a choice, all rows."""
    if not is_adaptive:
        return (num_rows,)
    return tree_widths(num_rows) if has_trees else chain_widths(num_rows)


class Gains(Protocol):
    """What every row has been worth so far."""

    def learn(self, width: int, result: Sequence[int], cycles: int = 1) -> None:
        """The oldest cycles whose result had not been seen had `width` rows, and this result."""

    def expected_tokens(self) -> list[float]:
        """Committed tokens per request of a cycle with 1, 2, ... rows."""


class _Rates:
    """How often things were accepted of the times that they were tried, the last times most. All are taken to be worth
    it until they are known not to be."""

    def __init__(self, count: int) -> None:
        self._tried, self._accepted = ([1.0] * count for _ in range(2))

    def add(self, tried: int, accepted: Sequence[int], first: int = 0, cycles: int = 1) -> None:
        """Of the things from `first` on, which have been tried as often as each other, in so many cycles."""
        # A large batch tells as much in a few cycles, and begins one text as another ends.
        decay = SETTINGS.decay ** max(cycles, tried / SETTINGS.tried_at_once)
        for j, count in enumerate(accepted, start=first):
            self._tried[j] = decay * self._tried[j] + tried
            self._accepted[j] = decay * self._accepted[j] + count

    def __iter__(self) -> Iterator[float]:
        return (accepted / tried for accepted, tried in zip(self._accepted, self._tried, strict=True))


class ChainGains:
    """Of the drafts of a block, each of which is accepted behind accepted ones only."""

    def __init__(self, block_size: int, learned_every: int = 1) -> None:
        """
        Args:
            learned_every: cycles of one width whose results are learned from at once.
        """
        # Of the drafts, where those before them were accepted.
        self._rates = _Rates(block_size - 1)
        self._learned_every = learned_every
        # Of the last cycles, which had one width: accepted drafts of each block.
        self._width, self._cycles = 0, 0
        self._blocks: list[int] = []
        self._expected: list[float] | None = None

    def learn(self, width: int, result: Sequence[int], cycles: int = 1) -> None:
        """`result`: accepted drafts of each request."""
        if width != self._width:
            self._settle()
            self._width = width
        self._blocks.extend(result)
        self._cycles += cycles
        if self._cycles >= self._learned_every:
            self._settle()

    def _settle(self) -> None:
        if not self._cycles:
            return
        blocks = Counter(self._blocks)
        # Those with at least 0, 1, ... accepted drafts.
        reached = list(accumulate(blocks[correct] for correct in reversed(range(self._width))))[::-1]
        for j, (tried, accepted) in enumerate(pairwise(reached)):
            self._rates.add(tried, [accepted], first=j, cycles=self._cycles)
        self._cycles, self._expected = 0, None
        self._blocks.clear()

    def expected_tokens(self) -> list[float]:
        if self._expected is None:
            self._expected = list(accumulate(accumulate((1.0, *self._rates), mul)))
        return self._expected


class TreeGains:
    """Of the nodes of a tree, in the order in which they are taken: the tree of W nodes is the first W of any larger
    one, so a node's own rate of acceptance is what it adds to a tree that ends with it."""

    def __init__(self, num_nodes: int) -> None:
        # The root is always accepted.
        self._rates = _Rates(num_nodes)
        self._expected: list[float] | None = None

    def learn(self, width: int, result: Sequence[int], cycles: int = 1) -> None:
        """`result`: for each node the number of requests that accepted it; of the root, all that have a tree."""
        self._rates.add(result[0], result[:width], cycles=cycles)
        self._expected = None

    def expected_tokens(self) -> list[float]:
        if self._expected is None:
            self._expected = list(accumulate(self._rates))
        return self._expected


@dataclass
class _Average:
    """Of the cycles of one width whose batches are about as large; the last ones count most."""

    bs: float
    seconds: float

    def add(self, bs: int, seconds: float) -> None:
        self.bs += SETTINGS.newest * (bs - self.bs)
        self.seconds += SETTINGS.newest * (_without_pause(seconds, self.seconds) - self.seconds)


class MeasuredCost:
    """What steps take whose cycles run without a graph: on a CPU, which is busy with nothing else meanwhile.

    Batches of 5 to 8 requests, of 9 to 16 and so on are of one size, of which an average is kept, and a width's seconds
    are on a line from one to the next: clients come and go, and each of their numbers would be found out anew. What is
    not tried is taken to need a little less from cycle to cycle, as other things may have run when it was. More rows
    have to be better than one by more than such measurements are unsure of.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = tuple(widths)
        self._has_begun: set[tuple[int, int]] = set()
        # By width and then by size.
        self._averages: dict[int, dict[int, _Average]] = {width: {} for width in widths}
        # So far, and until each width was last tried.
        self._cycles, self._tried = 0, dict.fromkeys(widths, 0)
        # When the last step began, and the batch size and width of its cycle.
        self._begun, self._running = 0.0, None

    def begin_step(self, now: float, is_cycle: bool) -> None:
        """A step begins, of whatever kind. Only between two cycles has a server done nothing else, nor waited."""
        if self._running is not None and is_cycle:
            self._add(*self._running, now - self._begun)
        self._begun, self._running = now, None

    def begin_cycle(self, bs: int, width: int) -> None:
        """This step is a cycle without a graph."""
        self._running = bs, width
        self._cycles += 1
        self._tried[width] = self._cycles

    def __call__(self, bs: int, width: int) -> float:
        """Seconds; 0 where nothing is known. Of the widths that have not been tried, the narrowest takes at least what
        narrower ones say, and others have to wait."""
        seconds = self._measured(bs, width)
        narrower = [other for other in self._widths if other < width]
        if seconds is not None:
            doubt = SETTINGS.doubt if narrower else 1.0
            return seconds * doubt * SETTINGS.fading ** (self._cycles - self._tried[width])
        if not narrower:
            return 0.0
        known = [self._measured(bs, other) for other in narrower]
        if None in known:
            return math.inf
        seconds = known[-1]
        if len(narrower) > 1:
            slope = (seconds - known[-2]) / (narrower[-1] - narrower[-2])
            # Half, as the rows behind the first have brought the drafter's forward along.
            seconds += max(0.0, slope) / (2 if len(narrower) == 2 else 1) * (width - narrower[-1])
        return seconds

    def _measured(self, bs: int, width: int) -> float | None:
        averages = sorted(self._averages[width].values(), key=lambda average: average.bs)
        # Lines say little about batches much smaller or larger than all that were tried.
        if averages and averages[0].bs / 2 <= bs <= 2 * averages[-1].bs:
            return _on_line(averages, bs)
        return None

    def _add(self, bs: int, width: int, seconds: float) -> None:
        """The first of a kind does not count: it may have to make what the others need."""
        size = _size(bs)
        if (size, width) in self._has_begun:
            self._averages[width].setdefault(size, _Average(bs, seconds)).add(bs, seconds)
        self._has_begun.add((size, width))


def _without_pause(seconds: float, usual: float) -> float:
    """A cycle that was held up, by a pause say, does not count as what it took."""
    return min(seconds, 2 * usual)


def _size(bs: int) -> int:
    """Batches of 5 to 8 requests, of 9 to 16 and so on are of one size."""
    return (bs - 1).bit_length()


def _on_line(averages: Sequence[_Average], bs: int) -> float:
    """Seconds of `bs` requests, by averages in the order of their batch sizes."""
    nearest = min(averages, key=lambda average: abs(average.bs - bs))
    share = nearest.seconds * bs / nearest.bs
    if len(averages) == 1:
        return share
    i = min(max(1, bisect_left(averages, bs, key=lambda average: average.bs)), len(averages) - 1)
    a, b = averages[i - 1 : i + 1]
    seconds = a.seconds + (b.seconds - a.seconds) * (bs - a.bs) / (b.bs - a.bs)
    # More requests take longer, and no more than their share.
    return sorted((share, seconds, nearest.seconds))[1]


class _Paces:
    """Of the last cycles whose batches are about as large: seconds that the host took, and how many of them until it
    had the result of the cycle before, which it did not wait for."""

    def __init__(self) -> None:
        self._host: deque[float] = deque(maxlen=SETTINGS.paces)
        self.until_read: deque[float] = deque(maxlen=SETTINGS.paces)
        # The former, ascending, and sums of all but the first 0, 1, ... of them: they are asked for often.
        self._ascending: list[float] = []
        self._sums: list[float] = []

    def add(self, seconds: float) -> None:
        self._host.append(_without_pause(seconds, median(self._host)) if self._host else seconds)
        self._ascending = sorted(self._host)
        self._sums = [*accumulate(reversed(self._ascending), initial=0.0)][::-1]

    def mean(self, gpu_seconds: float) -> float:
        """Of what these cycles would have taken, had the GPU needed so long."""
        shorter = bisect_left(self._ascending, gpu_seconds)
        return (shorter * gpu_seconds + self._sums[shorter]) / len(self._ascending)


class HostPace:
    """How long the host takes from one cycle's launch to the next one's, besides waiting for the GPU.

    Under overlap scheduling the host prepares a step while the cycle before it runs. Where that has ended by the time
    that the next can be launched, as small targets' does, rows that the GPU would have computed meanwhile cost nothing.
    Hosts are slower for a while now and then, and a cycle takes what either needs: the mean over the last few counts.
    Batches of one size (:func:`_size`) share it: clients come and go, and in few cycles a batch has as many requests as
    before.
    """

    def __init__(self, measured_every: int) -> None:
        """
        Args:
            measured_every: steps from one cycle that is measured to the next, as looking at it takes the host time too.
        """
        self._measured_every = measured_every
        self._paces: dict[int, _Paces] = {}
        # Steps so far, and how many there are when a cycle is to be measured again.
        self._steps, self._due = 0, 0
        # Of the cycle that is measured: the number of its step, when it was launched, and its batch size.
        self._step, self._launched, self._bs = -2, 0.0, 0
        # When the host last had the result of a cycle.
        self._read = 0.0

    def begin_step(self) -> None:
        """A step of whatever kind begins."""
        self._steps += 1

    @property
    def is_due(self) -> bool:
        """Whether a cycle is to be measured, if the step after it is one too."""
        return self._steps >= self._due

    @property
    def is_measuring(self) -> bool:
        """Whether the step before this one has launched a cycle that is measured."""
        return self._step == self._steps - 1

    def begin_cycle(self, now: float, bs: int) -> None:
        """This step launches a cycle of so many requests, and does not wait for it."""
        self._step, self._launched, self._bs = self._steps, now, bs

    def read_result(self, now: float) -> None:
        """The host has waited for a cycle, whose result it needed."""
        self._read = now

    def end_cycle(self, now: float, has_gpu_waited: bool) -> None:
        """This step launches a cycle too; `has_gpu_waited`: the one that is measured has ended."""
        seconds, until_read = now - self._launched, self._read - self._launched
        has_read = until_read > 0
        if not has_gpu_waited and not has_read:
            # The host has waited for a prefill, and nobody knows how long.
            return
        paces = self._paces.setdefault(_size(self._bs), _Paces())
        if not has_gpu_waited:
            # The host has waited for a result before it read it.
            seconds += (median(paces.until_read) if paces.until_read else 0.0) - until_read
        elif has_read:
            paces.until_read.append(until_read)
        paces.add(seconds)
        self._due = self._steps + self._measured_every

    def seconds(self, bs: int, gpu_seconds: float) -> float:
        """What a cycle takes, whose work takes the GPU so long."""
        if not self._paces:
            return gpu_seconds
        size = _size(bs)
        if size not in self._paces:
            size = min(self._paces, key=lambda other: abs(other - size))
        return self._paces[size].mean(gpu_seconds)


class VerifyWidth:
    """The width with the most tokens per time, from the acceptance seen so far.

    Every tensor-parallel rank sees the same results at the same cycles, and so chooses the same.
    """

    def __init__(
        self, widths: Sequence[int], cost: Callable[[int, int], float], gains: Gains, chosen_every: int = 1
    ) -> None:
        """
        Args:
            widths: to choose from, ascending; the last is all rows.
            cost: what a cycle of bs requests with W rows each takes, in any unit: `cost(bs, W)`; 0 has to be found out,
                the narrowest first. Equal on every rank.
            gains: of all rows.
            chosen_every: cycles that a choice is for, as far as they have as many requests.
        """
        self._widths, self._cost, self._gains = tuple(widths), cost, gains
        self._chosen_every = chosen_every
        # By the number of requests: the width and what its cycle costs. And the cycles since these were all forgotten.
        self._choices: dict[int, tuple[int, float]] = {}
        self._cycles = 0
        # What cycles have cost since one last had more rows than were best.
        self._since = 0.0
        # Of the cycles whose results have not been seen, in order.
        self._pending: deque[int] = deque()

    def again(self, bs: int) -> int | None:
        """The width of the next cycle, of bs requests, where a choice is for it too; None: it has to be chosen.

        What a choice follows from changes little in a few cycles, and looking at all of it takes longer than most of
        what the host does for a cycle.
        """
        if bs not in self._choices:
            return None
        width, cost = self._choices[bs]
        self._begin(width, cost)
        return width

    def choose(self, bs: int, more: float = 0.0, paced: Callable[[int, float], float] | None = None) -> int:
        """The width of the next cycle, of bs requests.

        Args:
            more: what it costs besides, whatever the width.
            paced: what it costs where that is not all: `paced(bs, cost)`.
        """
        best, cost, is_trial = len(self._widths) - 1, 0.0, False
        costs = [self._cost(bs, width) for width in self._widths] if len(self._widths) > 1 else [math.inf]
        # Without a graph all rows are verified.
        if min(costs) < math.inf:
            costs = [known and known + more for known in costs]
            if paced is not None:
                costs = [paced(bs, known) for known in costs]
            tokens = self._gains.expected_tokens()
            rates = [
                tokens[width - 1] / known if known else math.inf
                for width, known in zip(self._widths, costs, strict=True)
            ]
            best = rates.index(max(rates))
            cost = costs[best]
            if cost:
                # What more rows would give becomes known by trying them.
                wider = next((i for i in range(best + 1, len(costs)) if costs[i] < math.inf), best)
                is_trial = self._since >= SETTINGS.explore_every * costs[wider]
                if is_trial:
                    best, cost, self._since = wider, 0.0, 0.0
        width = self._widths[best]
        if not is_trial:
            self._choices[bs] = width, cost
        self._begin(width, cost)
        return width

    def _begin(self, width: int, cost: float) -> None:
        self._since += cost
        self._pending.append(width)
        self._cycles += 1
        if self._cycles >= self._chosen_every:
            self._choices.clear()
            self._cycles = 0

    def complete(self, result: Sequence[int] | None, cycles: int = 1) -> int:
        """The oldest cycle whose end had not been seen has ended.

        Args:
            result: as `Gains.learn` wants it, of this cycle and others of its width before it, `cycles` in all; None:
                it will come with one of the next.

        Returns:
            The width of the cycle.
        """
        width = self._pending.popleft()
        if len(self._widths) > 1 and result is not None:
            self._gains.learn(width, result, cycles)
        return width
