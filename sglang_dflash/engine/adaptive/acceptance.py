"""Committed tokens of a cycle by its draft length, learned from what recent cycles accepted.

Every tensor-parallel rank learns the same results at the same cycles.
Shapes: B block size, N verified tokens of a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import Protocol

from sglang_dflash.engine.metrics import AcceptedInTrees

# What remains of an acceptance count after another draft at its position: usual rates are those of a thousand drafts.
DRAFT_DECAY = 0.999
# What remains of it after another cycle at the most: recent rates are those of the last hundred cycles or fewer.
CYCLE_DECAY = 0.99
# Recent rates count alone if cycles accept more, or fewer, of the shortest drafts than usual by this share: the texts
# are others. Chance changes a hundred cycles by less.
CHANGED_TEXTS = 1 / 3


def chain_lengths(block_size: int) -> tuple[int, ...]:
    """Return the draft lengths of chains: 1 and quarters of a block. Each takes CUDA graphs of its own."""
    return tuple(sorted({1} | {max(2, -(-block_size * quarters // 4)) for quarters in (1, 2, 3, 4)}))


def tree_lengths(num_nodes: int) -> tuple[int, ...]:
    """Return the draft lengths of trees: 1, and trees of half as many nodes as the next."""
    lengths = [num_nodes]
    while lengths[-1] >= 8:
        lengths.append(lengths[-1] // 2)
    return (1, *reversed(lengths))


class AcceptanceModel(Protocol):
    """Expected tokens of a cycle by draft length.

    Attributes:
        lengths: draft lengths to choose from, ascending.
    """

    lengths: tuple[int, ...]

    def learn(
        self,
        length: int,
        num_correct_drafts: Sequence[int],
        fallback: Sequence[int] = (),
        in_trees: AcceptedInTrees | None = None,
    ) -> None:
        """Take the result of the oldest cycle that has not been learned from.

        Args:
            length: its draft length.
            num_correct_drafts: accepted drafts of each request, without the bonus tokens.
            fallback: indices of requests that needed SGLang's sampler; among trees, they had chains.
            in_trees: what the trees of this cycle and of earlier ones accepted; None: it comes with a later cycle.
        """

    def expected_tokens(self, fallback_share: float) -> Sequence[float]:
        """Return the committed tokens per request of a cycle with draft lengths 1, 2, ...

        Args:
            fallback_share: share of the requests that need SGLang's sampler.
        """


class _AcceptanceRates:
    """Share of the tried drafts that were accepted, by position or node, weighted towards recent drafts.

    A draft counts as accepted until it has been tried.
    """

    def __init__(self, count: int, cycle_decay: float = 1.0) -> None:
        """
        Args:
            count: positions or nodes.
            cycle_decay: what remains of a count after a cycle, unless its drafts leave less.
        """
        self._tried, self._accepted = ([1.0] * count for _ in range(2))
        self._cycle_decay = cycle_decay

    def add(self, tried: int, accepted: Sequence[int], first: int, cycles: int) -> None:
        """Count accepted drafts. See :meth:`_ExpectedTokens.add`."""
        decay = min(DRAFT_DECAY**tried, self._cycle_decay**cycles)
        for j, count in enumerate(accepted, start=first):
            self._tried[j] = decay * self._tried[j] + tried
            self._accepted[j] = decay * self._accepted[j] + count

    def __iter__(self) -> Iterator[float]:
        return (accepted / tried for accepted, tried in zip(self._accepted, self._tried, strict=True))


class _ExpectedTokens:
    """Committed tokens of a cycle by its draft length: the usual ones, or the recent ones if the texts have changed.

    A hundred cycles of one request say too little for a choice between lengths that are nearly as good.
    """

    def __init__(self, count: int, tokens: Callable[[Iterable[float]], Iterable[float]], shortest: int) -> None:
        """
        Args:
            count: positions or nodes.
            tokens: returns the committed tokens of the draft lengths 1, 2, ... by acceptance rates.
            shortest: the shortest draft length with drafts, which most cycles tell about.
        """
        self._usual, self._recent = _AcceptanceRates(count), _AcceptanceRates(count, CYCLE_DECAY)
        self._tokens, self._shortest = tokens, shortest
        self._expected: list[float] | None = None

    def add(self, tried: int, accepted: Sequence[int], first: int = 0, cycles: int = 1) -> None:
        """Count accepted drafts.

        Args:
            tried: how often each of these drafts was verified.
            accepted: how often each was accepted.
            first: index of the first of these drafts.
            cycles: how many cycles the counts are from.
        """
        for rates in (self._usual, self._recent):
            rates.add(tried, accepted, first, cycles)
        self._expected = None

    def __call__(self) -> Sequence[float]:
        """Return the committed tokens with draft lengths 1, 2, ..."""
        if self._expected is None:
            usual, recent = (list(self._tokens(rates)) for rates in (self._usual, self._recent))
            accepted, usually_accepted = recent[self._shortest - 1] - 1, usual[self._shortest - 1] - 1
            is_other_text = abs(accepted - usually_accepted) > CHANGED_TEXTS * usually_accepted
            self._expected = recent if is_other_text else usual
        return self._expected


class ChainAcceptance:
    """Acceptance of chains, where a draft is accepted only after all drafts before it."""

    def __init__(self, block_size: int, cycles_per_update: int = 1) -> None:
        """
        Args:
            block_size: B.
            cycles_per_update: consecutive cycles of one draft length that are learned together.
        """
        self.lengths = chain_lengths(block_size)
        # Rates are those of each draft, given that those before it were accepted.
        self._expected = _ExpectedTokens(
            block_size - 1, lambda rates: accumulate(accumulate((1.0, *rates), mul)), self.lengths[1]
        )
        self._cycles_per_update = cycles_per_update
        # The cycles that are to be learned next, all of one draft length: accepted drafts of each request.
        self._length, self._cycles = 0, 0
        self._correct: list[int] = []

    def learn(
        self,
        length: int,
        num_correct_drafts: Sequence[int],
        fallback: Sequence[int] = (),
        in_trees: AcceptedInTrees | None = None,
    ) -> None:
        if length != self._length:
            self._update()
            self._length = length
        self._correct.extend(num_correct_drafts)
        self._cycles += 1
        if self._cycles >= self._cycles_per_update:
            self._update()

    def _update(self) -> None:
        if not self._cycles:
            return
        requests = Counter(self._correct)
        # Requests with at least 0, 1, ... accepted drafts.
        reached = list(accumulate(requests[correct] for correct in reversed(range(self._length))))[::-1]
        for j, (tried, accepted) in enumerate(pairwise(reached)):
            self._expected.add(tried, [accepted], first=j, cycles=self._cycles)
        self._cycles = 0
        self._correct.clear()

    def expected_tokens(self, fallback_share: float = 0.0) -> Sequence[float]:
        return self._expected()


class TreeAcceptance:
    """Acceptance of trees, and of the chains of requests that need SGLang's sampler.

    The tree of N nodes is the first N nodes of every larger one. So the acceptance rate of a node is what it adds to a
    tree that ends with it.
    """

    def __init__(self, num_nodes: int, block_size: int, cycles_per_update: int = 1) -> None:
        """
        Args:
            num_nodes: N of the largest tree.
            block_size: B, the length of the longest chain.
            cycles_per_update: see :class:`ChainAcceptance`.
        """
        self.lengths = tree_lengths(num_nodes)
        # The root is always accepted.
        self._expected = _ExpectedTokens(num_nodes, accumulate, self.lengths[1])
        self._chains = ChainAcceptance(block_size, cycles_per_update)
        self._block_size = block_size

    def learn(
        self,
        length: int,
        num_correct_drafts: Sequence[int],
        fallback: Sequence[int] = (),
        in_trees: AcceptedInTrees | None = None,
    ) -> None:
        if fallback:
            self._chains.learn(min(length, self._block_size), [num_correct_drafts[i] for i in fallback])
        if in_trees is not None:
            self._expected.add(in_trees.nodes[0], in_trees.nodes, cycles=in_trees.cycles)

    def expected_tokens(self, fallback_share: float = 0.0) -> Sequence[float]:
        expected = self._expected()
        if not fallback_share:
            return expected
        chains = self._chains.expected_tokens()
        return [
            (1 - fallback_share) * tokens + fallback_share * chains[min(i, self._block_size - 1)]
            for i, tokens in enumerate(expected)
        ]
