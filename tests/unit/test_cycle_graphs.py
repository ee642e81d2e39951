"""Choice of graphs for smaller draft lengths, by the time that their replays take."""

import math
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.engine import graphs
from sglang_dflash.engine.adaptive.graph_sizes import graph_sizes, spread
from sglang_dflash.engine.graphs import CycleGraphRunner, CycleGraphs
from sglang_dflash.types import Block

SIZES = (1, 2, 4, 8, 16)


class Runner:
    """A `CycleGraphRunner` whose replays take a given time."""

    model_runner = None

    def __init__(self, num_tokens, times, sizes=SIZES):
        self.num_tokens, self._times, self.capture_bs = num_tokens, times, list(sizes)
        self.min_bs = max((bs for bs in SIZES if bs < sizes[0]), default=0) + 1

    def other(self, num_tokens, sizes):
        return Runner(num_tokens, self._times, sizes)

    def has(self, bs):
        return self.min_bs <= bs <= self.capture_bs[-1]

    def padded(self, bs):
        return min(size for size in self.capture_bs if size >= bs)

    def seconds(self, bs):
        return self._times(bs, self.num_tokens)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    group = SimpleNamespace(broadcast_object=lambda seconds, src: seconds)
    monkeypatch.setattr(graphs, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    monkeypatch.setattr(graphs, "log_info_on_rank0", lambda logger, message: None)
    reserved = iter([4.5, 5.0] * 100)
    monkeypatch.setattr(graphs, "_reserved_gib", lambda: next(reserved))


@pytest.mark.parametrize(
    ("free_rows", "first_of_4", "first_of_8"), [(15, 1, 1), (40, 4, 4), (64, 8, 8), (100, 8, 8), (200, 16, 16)]
)
def test_graphs_between_are_for_batches_that_fewer_rows_make_faster(free_rows, first_of_4, first_of_8):
    built = CycleGraphs(Runner(16, lambda bs, rows: max(1.0, bs * rows / free_rows)), (1, 4, 8))

    assert built.lengths == (1, 4, 8, 16)
    firsts = {1: 1, 4: first_of_4, 8: first_of_8, 16: 1}
    assert {length: built[length].capture_bs[0] for length in built.lengths} == firsts
    assert all(built[length].capture_bs == [bs for bs in SIZES if bs >= first] for length, first in firsts.items())
    # Batches that are padded to the smallest of these sizes have these graphs too.
    for bs in range(1, 18):
        for length in built.lengths:
            cost = built.cost(bs, length)
            assert (cost < math.inf) == built[length].has(bs)
            if cost < math.inf:
                assert cost == max(1.0, built[length].padded(bs) * length / free_rows)


def test_none_are_between_where_rows_are_free():
    assert CycleGraphs(Runner(16, lambda bs, rows: 1.0), (1, 4, 8, 12)).lengths == (1, 16)
    assert CycleGraphs(Runner(16, lambda bs, rows: 1.0), ()).lengths == (16,)


@pytest.mark.parametrize(
    ("free_rows", "small"), [(15, []), (32, [1]), (70, [1, 2]), (128, [1, 2, 4]), (1000, [1, 2, 4, 8])]
)
def test_longer_drafts_are_for_small_batches(free_rows, small):
    """They have graphs where twice the rows cost little, and no more rows than the largest batch."""
    built = CycleGraphs(Runner(16, lambda bs, rows: max(1.0, bs * rows / free_rows)), (1, 8, 32))

    assert built.common_length == 16
    assert (32 in built.lengths) == bool(small)
    if small:
        assert built[32].capture_bs == small
        assert [built.cost(bs, 32) < math.inf for bs in range(1, 18)] == [bs <= small[-1] for bs in range(1, 18)]


def test_one_disturbed_time_takes_no_graphs_of_longer_drafts_away():
    of_common = {1: 0.8, 2: 1.0, 4: 1.0, 8: 1.0, 16: 2.0}
    assert graph_sizes(32, 16, of_common) == [2, 4]
    assert graph_sizes(32, 16, of_common | {1: 1.0, 4: 1.2}) == [1, 2, 4]
    assert graph_sizes(32, 16, {1: 1.0}) == []


def test_the_first_request_of_a_mixture_of_experts():
    """Each token of one request loads experts, so fewer tokens are faster at once. Later ones find them loaded."""
    built = CycleGraphs(Runner(16, lambda bs, rows: 4 - 0.95 ** (bs * rows)), (1, 4, 8))
    assert built[4].capture_bs[0] == built[8].capture_bs[0] == 1


def test_what_the_graphs_took():
    cost = CycleGraphs(Runner(16, lambda bs, rows: bs * rows), (1, 4, 8)).cost_of_others
    assert (cost.num_graphs, cost.gib) == (15, 0.5)
    assert str(cost).startswith("15 CUDA graphs of other draft lengths were captured in ")
    assert str(cost).endswith(" s and take 0.50 GiB.")
    assert CycleGraphs(Runner(16, lambda bs, rows: 1.0), ()).cost_of_others is None


# SGLang's sizes for speculation and up to 64 requests, the default.
DEFAULT_SIZES = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4)]


def test_few_graphs_are_captured_of_default_sizes():
    """About as many as of the longest draft, which SGLang captures anyway. Usual numbers of clients are not padded."""
    assert spread(DEFAULT_SIZES, 1) == [1, 2, 4, 8, 16, 32, 64]
    assert spread(DEFAULT_SIZES, 8) == [1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64]
    # Qwen3-8B's shape on an H100.
    seconds = {bs: 7.2 + max(0.0, 16 * bs - 16) / 80 + max(0.0, 16 * bs - 128) / 90 for bs in DEFAULT_SIZES}
    captured = {length: graph_sizes(length, 16, seconds) for length in (1, 4, 8)}
    assert sum(map(len, captured.values())) < 1.2 * len(DEFAULT_SIZES)
    assert all(sizes[-4:] == [32, 40, 48, 64] for sizes in (captured[4], captured[8]))


@pytest.mark.parametrize("sizes", [DEFAULT_SIZES, [1], [5, 9], [4, 8, 16, 64], list(range(1, 65))], ids=str)
@pytest.mark.parametrize("length", [1, 4, 8, 32])
def test_batches_are_padded_by_no_more_than_a_third(sizes, length):
    kept = spread(sizes, length)
    assert kept[-1] == sizes[-1] and kept[0] == sizes[0] and kept == sorted(set(kept))
    for small, large in pairwise(kept):
        skipped = [bs for bs in sizes if small < bs < large]
        assert not skipped or large <= (2 if large * length <= 96 else 4 / 3) * small + 1e-9


def test_timed_requests_have_bonus_tokens_of_their_own(monkeypatch):
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 2.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    block = Block.empty(8, 16, torch.device("cpu"))
    block.input_ids.zero_()
    replayed = []
    backend = SimpleNamespace(
        replay_session=nullcontext, replay=lambda key, batch: replayed.append(block.take(5, 4).input_ids.clone())
    )
    runner = SimpleNamespace(
        _block=block,
        _draft_length=4,
        _graphs={(5, False): SimpleNamespace(batch=None)},
        _make_graph_key=lambda bs: bs,
        backend=backend,
        model_runner=SimpleNamespace(model_config=SimpleNamespace(vocab_size=103)),
    )

    assert CycleGraphRunner.seconds(runner, 5) == 2e-3
    assert replayed[0].view(5, 4)[:, 0].tolist() == [0, 20, 40, 60, 80]
