"""Statistics of cycles with trees: accumulated on the device, and copied to the host at intervals."""

import torch

from sglang_dflash.engine.metrics import AcceptedInTrees, TreeCounts

CANDIDATES = 2


def serve(every: int, cycles: list[int]) -> list[AcceptedInTrees | None]:
    """Run cycles with trees of these numbers of nodes, or 0 for none.

    Each cycle accepts its root and the first candidate. Two cycles are in flight, as in overlap scheduling.
    """
    counts = TreeCounts(CANDIDATES, every)
    totals = {size: torch.zeros(size + CANDIDATES, dtype=torch.int64) for size in cycles if size}
    seen = []
    for i, size in enumerate(cycles):
        if size:
            totals[size][0] += 1
            totals[size][size] += 1
        counts.end_cycle(totals[size] if size else None)
        if i:
            seen.append(counts.complete())
    return [*seen, counts.complete()]


def accepted(size: int, cycles: int) -> AcceptedInTrees:
    return AcceptedInTrees([cycles] + [0] * (size - 1), [cycles, 0], cycles)


def test_every_cycle():
    assert serve(1, [4] * 3) == [accepted(4, 1)] * 3


def test_several_cycles_at_once():
    assert serve(3, [4] * 8) == [accepted(4, 1), None, None, accepted(4, 3), None, None, accepted(4, 3), None]


def test_another_size_is_looked_at_at_once():
    found = serve(4, [4, 4, 8, 4, 4, 4, 4])
    assert found == [accepted(4, 1), None, accepted(8, 1), accepted(4, 2), None, None, None]


def test_nobody_asks():
    assert serve(4, [0, 0]) == [None, None]
