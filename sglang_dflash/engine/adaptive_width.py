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
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import mul
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


class Gains(Protocol):
    """What every row has been worth so far."""

    def learn(self, width: int, result: Sequence[int]) -> None:
        """The oldest cycle whose result had not been seen had `width` rows, and this result."""

    def expected_tokens(self) -> list[float]:
        """Committed tokens per request of a cycle with 1, 2, ... rows."""


class _Rates:
    """How often things were accepted of the times that they were tried, the last times most. All are taken to be worth
    it until they are known not to be."""

    def __init__(self, count: int) -> None:
        self._tried, self._accepted = ([1.0] * count for _ in range(2))

    def add(self, j: int, tried: int, accepted: int) -> None:
        self._tried[j] = SETTINGS.decay * self._tried[j] + tried
        self._accepted[j] = SETTINGS.decay * self._accepted[j] + accepted

    def __iter__(self) -> Iterator[float]:
        return (accepted / tried for accepted, tried in zip(self._accepted, self._tried, strict=True))


class ChainGains:
    """Of the drafts of a block, each of which is accepted behind accepted ones only."""

    def __init__(self, block_size: int) -> None:
        # Of the drafts, where those before them were accepted.
        self._rates = _Rates(block_size - 1)

    def learn(self, width: int, result: Sequence[int]) -> None:
        """`result`: accepted drafts of each request."""
        counts = Counter(result)
        # Blocks with at least 0, 1, ... accepted drafts.
        reached = list(accumulate(counts[correct] for correct in reversed(range(width))))[::-1]
        for j, (tried, accepted) in enumerate(pairwise(reached)):
            self._rates.add(j, tried, accepted)

    def expected_tokens(self) -> list[float]:
        return list(accumulate(accumulate((1.0, *self._rates), mul)))


class TreeGains:
    """Of the nodes of a tree, in the order in which they are taken: the tree of W nodes is the first W of any larger
    one, so a node's own rate of acceptance is what it adds to a tree that ends with it."""

    def __init__(self, num_nodes: int) -> None:
        # The root is always accepted.
        self._rates = _Rates(num_nodes)

    def learn(self, width: int, result: Sequence[int]) -> None:
        """`result`: for each node the number of requests that accepted it; of the root, all that have a tree."""
        for j in range(width):
            self._rates.add(j, result[0], result[j])

    def expected_tokens(self) -> list[float]:
        return list(accumulate(self._rates))


class MeasuredCost:
    """What cycles have taken that are run without a graph: on a CPU, which is busy with nothing else meanwhile.

    Batches of 5 to 8 requests, of 9 to 16 and so on are one size, of which a request's share is kept: clients come and
    go, and each of their numbers would be found out anew.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = tuple(widths)
        self._has_begun: set[tuple[int, int]] = set()
        # A request's share, by size and then by width.
        self._seconds: defaultdict[int, dict[int, float]] = defaultdict(dict)

    def __call__(self, bs: int, width: int) -> float:
        """Seconds; 0 where nothing is known. Of those that have not been tried, the narrowest takes at least what
        narrower ones say, and others have to wait."""
        known = self._seconds[self._size(bs)]
        if width in known:
            return bs * known[width]
        narrower = [other for other in self._widths if other < width]
        if not narrower:
            return 0.0
        if any(other not in known for other in narrower):
            return math.inf
        seconds = known[narrower[-1]]
        if len(narrower) > 1:
            slope = (seconds - known[narrower[-2]]) / (narrower[-1] - narrower[-2])
            # Half, as the rows behind the first have brought the drafter's forward along.
            seconds += max(0.0, slope) / (2 if len(narrower) == 2 else 1) * (width - narrower[-1])
        return bs * seconds

    def add(self, bs: int, width: int, seconds: float) -> None:
        """Of one cycle; they are averaged, the last ones most. The first of a kind does not count: it may have to make
        what the others need."""
        kind, share = (self._size(bs), width), seconds / bs
        if kind in self._has_begun:
            of_size = self._seconds[kind[0]]
            known = of_size.get(width, share)
            of_size[width] = known + SETTINGS.newest * (share - known)
        self._has_begun.add(kind)

    @staticmethod
    def _size(bs: int) -> int:
        return (bs - 1).bit_length()


class HostPace:
    """How long the host takes from one cycle to the next step, where the GPU waits for it.

    Under overlap scheduling the host prepares a step while the cycle before it runs. Where that has ended by then, as
    small targets' do in large batches, rows that the GPU would have computed meanwhile cost nothing. One wait says
    little, as anything may hold up a host once; the least of several in a row counts.
    """

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._seconds: dict[int, float] = {}
        # Of the step that was last begun; the batch size of its cycle.
        self._begun, self._running = 0.0, None

    def begin_step(self, now: float, has_gpu_waited: bool) -> None:
        """A step of whatever kind begins; `has_gpu_waited`: the cycle before it has ended."""
        begun, self._begun = self._begun, now
        bs, self._running = self._running, None
        if bs is None:
            return
        recent = self._recent.setdefault(bs, deque(maxlen=SETTINGS.waits))
        if has_gpu_waited:
            recent.append(now - begun)
            if len(recent) == SETTINGS.waits:
                self._seconds[bs] = min(recent)
        else:
            # Whether the host would be faster with fewer rows is not seen any more, and to be found out again.
            recent.clear()
            self._seconds[bs] = SETTINGS.decay * self.seconds(bs)

    def begin_cycle(self, bs: int) -> None:
        """This step launches a cycle of so many requests, and does not wait for it."""
        self._running = bs

    def seconds(self, bs: int) -> float:
        """That a cycle takes at least, whatever the GPU does; 0 where the GPU does not wait."""
        return self._seconds.get(bs, 0.0)


class VerifyWidth:
    """The width with the most tokens per time, from the acceptance seen so far.

    Every tensor-parallel rank sees the same results at the same cycles, and so chooses the same.
    """

    def __init__(self, widths: Sequence[int], cost: Callable[[int, int], float], gains: Gains) -> None:
        """
        Args:
            widths: to choose from, ascending; the last is all rows.
            cost: what a cycle of bs requests with W rows each takes, in any unit: `cost(bs, W)`; 0 has to be found out,
                the narrowest first. Equal on every rank.
            gains: of all rows.
        """
        self._widths, self._cost, self._gains = tuple(widths), cost, gains
        # What cycles have cost since one last had more rows than were best.
        self._since = 0.0
        # Of the cycles whose results have not been seen, in order.
        self._pending: deque[int] = deque()

    def choose(self, bs: int, more: float = 0.0, least: float = 0.0) -> int:
        """The width of the next cycle, of bs requests.

        Args:
            more: what it costs besides, whatever the width.
            least: what it costs at least, whatever the width.
        """
        best = self._widths[-1]
        if len(self._widths) > 1:
            tokens = self._gains.expected_tokens()
            known = {width: self._cost(bs, width) for width in self._widths}
            costs = {width: max(cost + more, least) if cost else 0.0 for width, cost in known.items()}
            best = max(self._widths, key=lambda w: tokens[w - 1] / costs[w] if costs[w] else math.inf)
            if costs[best]:
                # What more rows would give becomes known by trying them.
                wider = next((w for w in self._widths if w > best and costs[w] < math.inf), best)
                if self._since >= SETTINGS.explore_every * costs[wider]:
                    best, self._since = wider, 0.0
                else:
                    self._since += costs[best]
        self._pending.append(best)
        return best

    def complete(self, result: Sequence[int]) -> int:
        """Learn from the oldest cycle whose result had not been seen, as `Gains.learn` wants it.

        Returns:
            Its width.
        """
        width = self._pending.popleft()
        if len(self._widths) > 1:
            self._gains.learn(width, result)
        return width
