"""Batch sizes for which CUDA graphs of a draft length are captured. Each graph takes start-up time and memory.

SGLang captures one draft length, the common one, for all its batch sizes. Shorter drafts get fewer graphs: batches in
between are padded, and sizes at which a length saves no time have none. Longer drafts get graphs for small batches.
Shapes: P requests of a graph, N verified tokens of a request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

# A shorter draft gets graphs for the batch sizes at which the common one takes more than this many times as long.
MIN_GAIN = 1.03
# A longer draft gets graphs for the batch sizes at which it takes at most this many times as long as the common one, as
# far as the times of larger batches tell.
MAX_LOSS = 1.1
# Tokens of a batch up to which more of them cost a GPU little, because it waits for weights.
FREE_TOKENS = 96
# Consecutive sizes differ by at most this factor, and by the second where tokens cost little.
_MAX_PADDING, _MAX_FREE_PADDING = 4 / 3, 2


def graph_sizes(length: int, common: int, seconds: Mapping[int, float]) -> list[int]:
    """Return the batch sizes of graphs with N = `length`, ascending.

    Args:
        length: N. Length 1 runs no drafter, and gets graphs for batches of any size.
        common: the N of `seconds`.
        seconds: duration of a cycle of the common draft by P, ascending.
    """

    def expected(bs: int) -> float:
        return _expected_seconds(bs * length / common, seconds)

    if length > common:
        # Memory is sized for the verified tokens of the largest batch, so a longer draft has no more of them.
        possible = [bs for bs in seconds if bs * length <= max(seconds) * common]
        gaining = [bs for bs in possible if expected(bs) <= MAX_LOSS * seconds[bs]]
        # One time that another process disturbed must not end them.
        return spread([bs for bs in possible if gaining[0] <= bs <= gaining[-1]], length) if gaining else []
    sizes = spread(list(seconds), length)
    return sizes if length == 1 else [bs for bs in sizes if seconds[bs] > MIN_GAIN * expected(bs)]


def spread(sizes: Sequence[int], length: int) -> list[int]:
    """Return some of the sizes, the largest among them, so that no batch is padded by much.

    Usual numbers of requests are kept: of the sizes that are near enough, the one with the most factors of two.

    Args:
        sizes: ascending.
        length: N.
    """
    kept = [sizes[-1]]
    while kept[-1] > sizes[0]:
        size = kept[-1]
        factor = _MAX_FREE_PADDING if size * length <= FREE_TOKENS else _MAX_PADDING
        smaller = [other for other in sizes if other < size]
        near = [other for other in smaller if other >= size / factor] or smaller[-1:]
        # The lowest set bit is the largest power of two that divides a number.
        kept.append(max(near, key=lambda other: other & -other))
    return kept[::-1]


def _expected_seconds(bs: float, seconds: Mapping[int, float]) -> float:
    """Return the duration of a cycle of `bs` requests, of which a fraction stands for requests with fewer tokens.

    It is on a line through the two next sizes.
    """
    sizes = list(seconds)
    if len(sizes) == 1:
        return 0.0
    i = min(max(1, bisect_left(sizes, bs)), len(sizes) - 1)
    a, b = sizes[i - 1 : i + 1]
    return seconds[a] + (seconds[b] - seconds[a]) * (bs - a) / (b - a)
