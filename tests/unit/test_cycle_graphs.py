"""Choice of graphs for smaller draft lengths, by the time that their replays take."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.engine import graphs
from sglang_dflash.engine.graphs import CycleGraphRunner, CycleGraphs
from sglang_dflash.types import Block


class Runner:
    """A `CycleGraphRunner` whose replays take a given time."""

    def __init__(self, num_tokens, times, min_bs=1):
        self.num_tokens, self._times, self.min_bs = num_tokens, times, min_bs
        self.capture_bs = [bs for bs in (1, 2, 4, 8, 16) if bs >= min_bs]

    def shorter(self, num_tokens, min_bs):
        return Runner(num_tokens, self._times, min_bs)

    def has(self, bs):
        return self.min_bs <= bs <= 16

    def padded(self, bs):
        return min(size for size in self.capture_bs if size >= bs)

    def seconds(self, bs):
        return self._times(bs, self.num_tokens)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    group = SimpleNamespace(broadcast_object=lambda seconds, src: seconds)
    monkeypatch.setattr(graphs, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    monkeypatch.setattr(graphs, "log_info_on_rank0", lambda logger, message: None)


@pytest.mark.parametrize(("free_rows", "min_bs"), [(15, 1), (40, 3), (64, 5), (100, 5), (200, 9)])
def test_graphs_between_are_for_batches_that_fewer_rows_make_faster(free_rows, min_bs):
    built = CycleGraphs(Runner(16, lambda bs, rows: max(1.0, bs * rows / free_rows)), (1, 4, 8, 12))

    assert built.lengths == (1, 4, 8, 12, 16)
    # Batches that are padded to the smallest of these sizes have these graphs too.
    assert [built[width].min_bs for width in built.lengths] == [1, 1, min_bs, min_bs, 1]
    for bs in range(1, 17):
        has_cost = [built.cost(built.padded(bs), width) < math.inf for width in built.lengths]
        assert has_cost == [built[width].has(bs) for width in built.lengths]


def test_none_are_between_where_rows_are_free():
    assert CycleGraphs(Runner(16, lambda bs, rows: 1.0), (1, 4, 8, 12)).lengths == (1, 4, 16)
    assert CycleGraphs(Runner(16, lambda bs, rows: 1.0), ()).lengths == (16,)


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
