"""`--speculative-adaptive`: how many tokens of a block are drafted and verified, chosen anew for every cycle.

A drafter proposes all tokens of a block at once, and few of the last ones are ever accepted. They cost nothing while
the GPU waits for weights anyway; once a batch is large enough to keep it computing, each token costs its share. A
drafter drafts the first tokens of a block as well without the last ones (scripts/results/cycle_notes.md), so they are
left out of its forward too.

Shapes: a block has B tokens, and the cycle's blocks its first W: the bonus token and W - 1 drafts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from operator import mul

from sglang_dflash.settings import SETTINGS


def verify_widths(block_size: int) -> tuple[int, ...]:
    """What is chosen from: quarters of a block, as each takes CUDA graphs of its own."""
    return tuple(sorted({max(2, -(-block_size * quarters // 4)) for quarters in (1, 2, 3, 4)}))


class VerifyWidth:
    """The width with the most tokens per time, from the acceptance seen so far.

    Every tensor-parallel rank sees the same results at the same cycles, and so chooses the same.
    """

    def __init__(self, widths: Sequence[int], cost: Callable[[int, int], float]) -> None:
        """
        Args:
            widths: to choose from, ascending; the last is a whole block, B.
            cost: what a cycle of bs requests with W tokens each takes, in any unit: `cost(bs, W)`. Equal on every rank.
        """
        self._widths, self._cost = tuple(widths), cost
        # Of draft j - 1, how often it was verified behind accepted ones, and how often it was accepted. Whole blocks
        # are taken to be worth it until they are known not to be.
        self._tried, self._accepted = ([1.0] * (widths[-1] - 1) for _ in range(2))
        self._cycle = 0
        # Of the cycles whose results have not been seen, in order.
        self._pending: deque[int] = deque()

    def choose(self, bs: int, more: float = 0.0) -> int:
        """The width of the next cycle, of bs requests; `more` is what it costs besides, whatever the width."""
        best = self._widths[-1]
        if len(self._widths) > 1 and self._cycle % SETTINGS.explore_every:
            tokens = self.expected_tokens()
            best = max(self._widths, key=lambda width: tokens[width - 1] / (self._cost(bs, width) + more))
        self._cycle += 1
        self._pending.append(best)
        return best

    def complete(self, num_correct_drafts: Sequence[int]) -> int:
        """Learn from the oldest cycle whose result had not been seen: accepted drafts of each request.

        Returns:
            Its width.
        """
        width = self._pending.popleft()
        if len(self._widths) == 1:
            return width
        counts = Counter(num_correct_drafts)
        # Blocks with at least 0, 1, ... accepted drafts.
        reached = list(accumulate(counts[correct] for correct in reversed(range(width))))[::-1]
        for j, (tried, accepted) in enumerate(pairwise(reached)):
            self._tried[j] = SETTINGS.decay * self._tried[j] + tried
            self._accepted[j] = SETTINGS.decay * self._accepted[j] + accepted
        return width

    def expected_tokens(self) -> list[float]:
        """[B], committed tokens per request of a cycle with blocks of 1, 2, ..., B."""
        rates = (accepted / tried for accepted, tried in zip(self._accepted, self._tried, strict=True))
        return list(accumulate(accumulate((1.0, *rates), mul)))
