"""Draft lengths of `--speculative-adaptive`: the choice of most tokens per second, and what it is made from."""

from __future__ import annotations

import math
import random
from functools import partial
from itertools import count, pairwise

import pytest
import torch

from sglang_dflash.engine.adaptive import controller
from sglang_dflash.engine.adaptive import cost as costs
from sglang_dflash.engine.adaptive.acceptance import ChainAcceptance, TreeAcceptance, chain_lengths, tree_lengths
from sglang_dflash.engine.adaptive.controller import LengthChooser
from sglang_dflash.engine.adaptive.cost import (
    FEWEST_REPLAYS,
    LATENCY_SAMPLES,
    REPLAY_SAMPLES,
    REPLAY_SPREAD,
    HostLatency,
    MeasuredCost,
    MeasuredReplays,
    ReplayTimer,
)
from sglang_dflash.engine.metrics import AcceptedInTrees

LENGTHS = (1, 4, 8, 12, 16)


def chain_result(draw: random.Random, rows: int, bs: int, acceptance: float) -> list[int]:
    return [next((n for n in range(rows - 1) if draw.random() > acceptance), rows - 1) for _ in range(bs)]


def tree_result(draw: random.Random, rows: int, bs: int, rates: list[float]) -> list[int]:
    return [sum(draw.random() < rates[j] for _ in range(bs)) for j in range(rows)]


def run(chooser: LengthChooser, result, cycles: int, bs: int = 8) -> list[int]:
    """Serve cycles with `result(draw, rows, bs)`, two in flight as in overlap scheduling; the widths that were
    chosen."""
    draw = random.Random(0)
    chosen = [chooser.reuse_choice(bs) or chooser.choose(bs)]
    for _ in range(cycles - 1):
        chosen.append(chooser.reuse_choice(bs) or chooser.choose(bs))
        assert chooser.completed(result(draw, chosen[-2], bs)) == chosen[-2]
    return chosen


def run_trees(chooser: LengthChooser, rates: list[float], cycles: int, bs: int = 8) -> list[int]:
    """Serve cycles one by one, in which each node is accepted at its own rate; the draft lengths that were chosen."""
    draw, chosen = random.Random(0), []
    for _ in range(cycles):
        chosen.append(chooser.choose(bs))
        nodes = tree_result(draw, chosen[-1], bs, rates)
        assert chooser.completed([0] * bs, AcceptedInTrees(nodes, [], 1)) == chosen[-1]
    return chosen


def run_chains(chooser: LengthChooser, acceptance: float, cycles: int) -> list[int]:
    return run(chooser, partial(chain_result, acceptance=acceptance), cycles)


def chains(cost, lengths=LENGTHS, cycles_per_choice=1) -> LengthChooser:
    return LengthChooser(lengths, cost, ChainAcceptance(lengths[-1]), cycles_per_choice)


def test_widths():
    assert chain_lengths(16) == LENGTHS
    assert chain_lengths(10) == (1, 3, 5, 8, 10)
    assert chain_lengths(2) == (1, 2)
    assert tree_lengths(64) == (1, 4, 8, 16, 32, 64)
    assert tree_lengths(20) == (1, 5, 10, 20)
    assert tree_lengths(4) == (1, 4)


@pytest.mark.parametrize("cycles_per_choice", [1, 8])
@pytest.mark.parametrize(
    ("acceptance", "fixed_cost", "best"),
    # Tokens per cycle: (1 - a^W) / (1 - a).
    [(0.3, 1, 1), (0.8, 2, 4), (0.8, 20, 8), (0.85, 20, 12), (0.95, 100, 16), (0.0, 100, 1)],
)
def test_most_tokens_per_time(acceptance, fixed_cost, best, cycles_per_choice):
    per_time = {w: (1 - acceptance**w) / (1 - acceptance) / (fixed_cost + w) for w in LENGTHS}
    assert max(per_time, key=per_time.get) == best

    chooser = chains(lambda bs, rows: fixed_cost + rows, cycles_per_choice=cycles_per_choice)
    chosen = run_chains(chooser, acceptance, 1000)[500:]

    # More are verified now and then, to learn what the next ones would give; that takes little time, and loses less.
    assert sum(w == best for w in chosen) > 0.85 * len(chosen)
    wider = min((w for w in LENGTHS if w > best), default=best)
    assert wider in chosen
    seconds = {w: fixed_cost + w for w in LENGTHS}
    served = sum(per_time[w] * seconds[w] for w in chosen) / sum(seconds[w] for w in chosen)
    assert served > 0.99 * per_time[best]


def test_most_tokens_per_time_of_trees():
    """A node is worth its own rate of acceptance, whatever became of the nodes before it."""
    rates = [1.0, 0.6, 0.3, 0.3, 0.25, 0.2, 0.2, 0.2] + 8 * [0.19] + 16 * [0.01]
    per_time = {w: sum(rates[:w]) / (12 + w) for w in tree_lengths(32)}
    assert max(per_time, key=per_time.get) == 16

    chooser = LengthChooser(tree_lengths(32), lambda bs, rows: 12 + rows, TreeAcceptance(32, 16))
    chosen = run_trees(chooser, rates, 1000)[500:]

    assert sum(w == 16 for w in chosen) > 0.9 * len(chosen)
    assert 32 in chosen


def test_cycles_without_a_tree_teach_nothing_about_trees():
    acceptance = TreeAcceptance(8, 8)
    acceptance.learn(4, [], in_trees=AcceptedInTrees([2, 1, 0, 1], [], 1))
    before = acceptance.expected_tokens()
    acceptance.learn(8, [0, 0], fallback=[0, 1], in_trees=AcceptedInTrees([0] * 8, [], 1))
    assert acceptance.expected_tokens() == pytest.approx(before)


def serve_trees_and_chains(num_chains: int, rates: list[float], cycles: int, acceptance: float = 0.0) -> list[int]:
    """Serve 32 requests with trees of up to 16 nodes, of which the last `num_chains` need SGLang's sampler and so have
    chains of up to 8 tokens; return the draft lengths that were chosen. A cycle costs 32 and one for each node."""
    chooser = LengthChooser(tree_lengths(16), lambda bs, length: 32 + bs * length, TreeAcceptance(16, 8))
    draw, fallback, chosen = random.Random(0), list(range(32 - num_chains, 32)), []
    for _ in range(cycles):
        length = chooser.choose(32, fallback)
        nodes = tree_result(draw, length, 32 - num_chains, rates)
        correct = [0] * (32 - num_chains) + chain_result(draw, min(length, 8), num_chains, acceptance)
        assert chooser.completed(correct, AcceptedInTrees(nodes, [], 1)) == length
        chosen.append(length)
    return chosen


def test_requests_that_get_chains_among_trees_are_learned_from():
    """No draft is ever accepted: drafting stops, as it does where all requests have trees."""
    assert serve_trees_and_chains(32, [1.0] * 16, 3000).count(1) > 2900
    nothing = [1.0] + 15 * [0.0]
    assert serve_trees_and_chains(0, nothing, 3000).count(1) > 2900
    assert serve_trees_and_chains(12, nothing, 3000).count(1) > 2900


def test_chains_among_trees_count_by_their_share():
    """A few chains whose drafts are wrong do not stop trees, and longer drafts are no gain to chains of a block."""
    rates = [1.0] + 15 * [0.9]
    assert serve_trees_and_chains(1, rates, 1000)[500:].count(16) > 450
    chosen = serve_trees_and_chains(32, rates, 1000, acceptance=0.999)[500:]
    assert chosen.count(8) > 450


def test_choices_are_for_batches_with_as_many_chains():
    chooser = LengthChooser((1, 4), lambda bs, length: bs * length, TreeAcceptance(4, 4), cycles_per_choice=8)
    chooser.choose(8)
    assert chooser.reuse_choice(8) is not None
    assert chooser.reuse_choice(8, [1, 3]) is None


def test_several_cycles_at_once():
    """They teach what they would one by one, but for the order."""
    draw = random.Random(0)
    results = [(width, chain_result(draw, width, 4, 0.7)) for width in [16] * 20 + [8] * 3 + [16] * 8]
    at_once, one_by_one = ChainAcceptance(16, cycles_per_update=8), ChainAcceptance(16)
    for width, result in results:
        at_once.learn(width, result)
        one_by_one.learn(width, result)
    learned = at_once.expected_tokens()
    assert learned == pytest.approx(one_by_one.expected_tokens(), rel=0.02)
    # Not yet, until cycles of another width come.
    at_once.learn(16, [0] * 4)
    assert at_once.expected_tokens() == learned
    at_once.learn(8, [0] * 4)
    assert at_once.expected_tokens()[-1] < learned[-1]

    nodes = [tree_result(draw, 8, 4, [1.0] + [0.4] * 7) for _ in range(8)]
    at_once, one_by_one = TreeAcceptance(8, 8), TreeAcceptance(8, 8)
    total = [sum(of_node) for of_node in zip(*nodes, strict=True)]
    at_once.learn(8, [], in_trees=AcceptedInTrees(total, [], cycles=8))
    for result in nodes:
        one_by_one.learn(8, [], in_trees=AcceptedInTrees(result, [], cycles=1))
    assert at_once.expected_tokens() == pytest.approx(one_by_one.expected_tokens(), rel=0.05)


def test_chance_and_change_of_one_request():
    """A hundred cycles of one request change little, unless its text is another."""

    def learned(draw: random.Random, cycles: int, rate: float) -> float:
        for _ in range(cycles):
            acceptance.learn(8, chain_result(draw, 8, 1, rate))
        return acceptance.expected_tokens()[-1]

    for seed in range(10):
        acceptance, draw = ChainAcceptance(8), random.Random(seed)
        usual = learned(draw, 2000, 0.7)
        assert learned(draw, 100, 0.7) == pytest.approx(usual, rel=0.05)
        assert learned(draw, 100, 0.05) < 0.7 * usual
        assert learned(draw, 200, 0.7) > 0.9 * usual


def test_long_contexts_make_rows_cheap():
    """Time that a cycle takes at any draft length is spread over its tokens."""
    acceptance = ChainAcceptance(16)
    for _ in range(200):
        acceptance.learn(16, [next((n for n in range(15) if (i * 7 + n * 3) % 10 >= 8), 15) for i in range(10)])
    chooser = LengthChooser(LENGTHS, lambda bs, rows: rows, acceptance)
    chooser.choose(8)
    tokens = acceptance.expected_tokens()
    for more in (0, 20, 400):
        assert chooser.choose(8, extra=more) == max(LENGTHS, key=lambda w: tokens[w - 1] / (w + more))
    assert chooser.choose(8, extra=0) < chooser.choose(8, extra=400)


def test_a_choice_is_for_several_cycles_of_as_many_requests():
    chooser = chains(lambda bs, rows: bs * rows**2, cycles_per_choice=4)
    assert chooser.reuse_choice(8) is None
    assert chooser.choose(8) == 1
    assert [chooser.reuse_choice(8) for _ in range(4)] == [1, 1, 1, None]
    # Clients come and go, and numbers of requests come again.
    chooser.choose(8)
    assert chooser.reuse_choice(4) is None
    assert chooser.choose(4) == 1
    assert chooser.reuse_choice(8) == chooser.reuse_choice(4) == 1
    assert chooser.reuse_choice(8) is chooser.reuse_choice(4) is None


def test_a_trial_of_more_rows_is_for_one_cycle():
    chooser = chains(lambda bs, rows: rows, cycles_per_choice=8)
    chosen = run_chains(chooser, 0.3, 6000)[1000:]
    trials = [i for i, w in enumerate(chosen) if w > 1]
    assert trials and min(b - a for a, b in pairwise(trials)) > 8
    # As much of the time as without.
    each = run_chains(chains(lambda bs, rows: rows), 0.3, 6000)[1000:]
    assert len(trials) == pytest.approx(sum(w > 1 for w in each), abs=1)


def test_free_rows_are_all_verified():
    assert set(run_chains(chains(lambda bs, rows: 1.0), 0.5, 300)) == {16}


def test_rows_that_the_host_leaves_time_for_are_verified():
    """Four rows take half as long as sixteen and commit more per second of the GPU, but the host takes longer still."""
    chooser = chains(lambda bs, rows: 4 + rows / 2)
    chosen = [chooser.choose(8)]
    draw = random.Random(0)
    for i in range(400):
        # Of the second half only eight rows fit into the host's time.
        host = 13 if i < 200 else 9
        chosen.append(chooser.choose(8, extra=1, latency=lambda bs, cost, host=host: max(cost, host)))
        chooser.completed(chain_result(draw, chosen[-2], 8, acceptance=0.5))
    assert chosen[100:200] == [16] * 100
    assert set(chosen[300:]) == {8, 12} and chosen[300:].count(8) > 90


class Host:
    """Launches cycles: `begins` seconds after a launch it waits until `ready` for the result of the cycle before, and
    `rest` later it launches the next one, if that is still to be waited for."""

    def __init__(self, steps_per_sample: int = 1) -> None:
        self.latency, self._steps_per_sample = HostLatency(steps_per_sample), steps_per_sample

    def cycle(self, bs: int, begins: float, rest: float, ready: float = 0.0, gpu_seconds: float = 0.0) -> None:
        latency = self.latency
        for _ in range(self._steps_per_sample):
            latency.begin_step()
        assert latency.is_due
        latency.begin_cycle(100.0, bs)
        read = max(begins, ready)
        latency.read_result(100.0 + read)
        latency.begin_step()
        assert latency.is_measuring
        latency.end_cycle(100.0 + read + rest, has_gpu_waited=gpu_seconds <= read + rest)


def test_host_latency():
    host = Host()
    latency = host.latency
    assert latency.seconds(8, 3.0) == 3.0
    # Known at once.
    host.cycle(8, begins=1.0, rest=4.0)
    assert latency.seconds(8, 3.0) == 5.0 and latency.seconds(8, 7.0) == 7.0
    # A pause does not count for what it is.
    for _ in range(LATENCY_SAMPLES):
        host.cycle(8, begins=1.0, rest=4.0)
    host.cycle(8, begins=1.0, rest=89.0)
    assert 5.0 < latency.seconds(8, 3.0) < 6.0
    # A host that is now faster than the GPU and now slower: both wait for each other.
    for rest in [3.0, 7.0] * LATENCY_SAMPLES:
        host.cycle(8, begins=1.0, rest=rest)
    assert [latency.seconds(8, gpu) for gpu in (3.0, 6.0, 9.0)] == pytest.approx([6.0, 7.0, 9.0])


def test_host_latency_of_batches_about_as_large():
    """With many clients a batch has as many requests as before in few cycles; each must not be unknown anew."""
    host = Host()
    for bs in (57, 64, 60, 61):
        host.cycle(bs, begins=1.0, rest=7.0)
    host.cycle(9, begins=1.0, rest=3.0)
    assert [host.latency.seconds(bs, 2.0) for bs in (1, 9, 16)] == [4.0] * 3
    assert [host.latency.seconds(bs, 2.0) for bs in (33, 62, 64, 90)] == [8.0] * 4


def test_a_host_that_waits_for_the_gpu():
    host = Host()
    # The GPU is the slower one: only what follows the wait is known of the host.
    host.cycle(8, begins=1.0, ready=5.0, rest=2.0, gpu_seconds=9.0)
    assert host.latency.seconds(8, 1.0) == 2.0
    # What comes before it is known once the GPU has waited.
    host = Host()
    host.cycle(8, begins=1.0, rest=2.0)
    for _ in range(LATENCY_SAMPLES):
        host.cycle(8, begins=1.0, ready=5.0, rest=4.0, gpu_seconds=10.0)
    assert host.latency.seconds(8, 1.0) == pytest.approx(5.0)


def test_host_latency_is_that_between_two_cycles():
    latency = HostLatency(steps_per_sample=4)
    latency.begin_step()
    assert latency.is_due and not latency.is_measuring
    latency.begin_cycle(10.0, 8)
    # A prefill.
    latency.begin_step()
    assert latency.is_due and latency.is_measuring
    latency.begin_step()
    assert not latency.is_measuring
    latency.begin_cycle(20.0, 8)
    latency.begin_step()
    # The host has waited for the prefill.
    latency.end_cycle(29.0, has_gpu_waited=False)
    assert latency.is_due and latency.seconds(8, 3.0) == 3.0
    latency.begin_cycle(30.0, 8)
    latency.begin_step()
    latency.end_cycle(35.0, has_gpu_waited=True)
    assert latency.seconds(8, 3.0) == 5.0
    assert not latency.is_due
    for _ in range(4):
        latency.begin_step()
    assert latency.is_due


def test_another_text_is_learned():
    """The rows that are seldom verified are seen to be worth it again."""
    chooser = chains(lambda bs, rows: 10 + rows)
    assert run_chains(chooser, 0.05, 500)[-1] == 1
    # The last of those cycles has not been completed.
    chooser.completed([0] * 8)
    assert run_chains(chooser, 0.97, 6000)[-1] == 16


def test_what_has_no_graph_is_not_chosen():
    assert set(run_chains(chains(lambda bs, rows: 1.0 if rows == 16 else math.inf), 0.1, 300)) == {16}


def test_one_width():
    assert run_chains(chains(lambda bs, rows: math.nan, lengths=(16,)), 0.5, 10) == [16] * 10


def take(cost: MeasuredCost, cycles: list[tuple[int, int, float]], now: float = 0.0) -> None:
    """Cycles of so many requests, of a width, that take so many seconds."""
    for bs, width, seconds in cycles:
        cost.begin_step(now, is_cycle=True)
        cost.begin_cycle(bs, width)
        now += seconds
    cost.begin_step(now, is_cycle=True)


def serve(true, batch_sizes: list[int], acceptance: float) -> list[int]:
    """The widths of cycles that take `true(bs, width)` seconds, and the first of each width longer."""
    cost, draw, chosen, now = MeasuredCost(LENGTHS), random.Random(0), [], 0.0
    chooser = chains(cost)
    for bs in batch_sizes:
        cost.begin_step(now, is_cycle=True)
        chosen.append(chooser.choose(bs))
        rows = chosen[-1]
        cost.begin_cycle(bs, rows)
        # What is made once takes its time.
        now += true(bs, rows) + (100.0 if chosen.count(rows) == 1 else 0.0)
        chooser.completed(chain_result(draw, rows, bs, acceptance))
    return chosen


def test_measured_cost():
    """Widths are tried, the narrowest first and the first cycle of each aside, while narrower ones leave hope that they
    are best; then the one is chosen that measures best."""
    seconds = {1: 1.0, 4: 1.1, 8: 2.0, 12: 3.0, 16: 4.0}
    chosen = serve(lambda bs, width: bs * seconds[width], [2] * 200, 0.7)
    assert chosen[:3] == [1, 1, 4] and 8 in chosen
    assert chosen[100:].count(4) > 90


def test_measured_cost_of_a_busy_machine():
    """If each token costs as much as the first, nearly all of the time goes into plain decoding.

    Clients come and go. Their numbers are not tried one by one, and long drafts that cannot gain are not tried at all.
    """
    draw = random.Random(1)
    batch_sizes = [draw.randint(17, 32) for _ in range(600)]

    def true(bs: int, width: int) -> float:
        return bs * (1.0 * width + (1.0 if width > 1 else 0.0))

    chosen = serve(true, batch_sizes, 0.5)
    assert set(chosen) <= {1, 4, 8}
    cycles = list(zip(batch_sizes, chosen))
    assert sum(true(bs, w) for bs, w in cycles if w > 1) < 0.06 * sum(true(bs, w) for bs, w in cycles)


def test_clients_that_leave_one_by_one():
    """The best draft length changes with the batch; sizes between those that were tried need no try."""

    def true(bs: int, width: int) -> float:
        return 10 + bs * (0.5 if width == 1 else 0.5 * width + 0.5)

    draw = random.Random(2)
    batch_sizes = [draw.choice((1, 8, 60)) for _ in range(300)] + list(range(64, 0, -1)) * 4
    chosen = serve(true, batch_sizes, 0.6)[300:]
    tokens = {w: (1 - 0.6**w) / 0.4 for w in LENGTHS}
    for repeat in range(4):
        spent = lost = 0.0
        for bs, width in zip(batch_sizes[300:][:64], chosen[64 * repeat :][:64]):
            best = max(tokens[w] / true(bs, w) for w in LENGTHS)
            spent += true(bs, width)
            lost += true(bs, width) - tokens[width] / best
        assert lost < 0.03 * spent


def test_seconds_of_other_batch_sizes():
    cost = MeasuredCost(LENGTHS)
    take(cost, [(8, 1, 99.0), (8, 1, 8.0)])
    # A share, where one size has been tried; half or twice as many are not known by that.
    assert cost(12, 1) == pytest.approx(12.0) and cost(4, 1) == pytest.approx(4.0)
    assert cost(3, 1) == 0.0 and cost(17, 1) == 0.0
    take(cost, [(40, 1, 99.0), (40, 1, 24.0)])
    # A line: 4 seconds, and half a second for each request.
    for bs, seconds in ((5, 6.5), (24, 16.0), (64, 36.0)):
        assert cost(bs, 1) == pytest.approx(seconds)


def test_what_else_happens_does_not_count():
    cost = MeasuredCost(LENGTHS)
    take(cost, [(8, 1, 9.0), (8, 1, 8.0)])
    # A prefill, and whatever time passes until then.
    cost.begin_step(100.0, is_cycle=True)
    cost.begin_cycle(8, 1)
    cost.begin_step(200.0, is_cycle=False)
    cost.begin_step(300.0, is_cycle=True)
    assert cost(8, 1) == pytest.approx(8.0)
    # A pause between two cycles.
    take(cost, [(8, 1, 1000.0)], 300.0)
    assert cost(8, 1) < 10.0


def test_a_width_that_was_held_up_is_tried_again():
    cycle = count()

    def true(bs: int, width: int) -> float:
        # One row is best, but was held up when it was tried.
        return {1: 8.0 if next(cycle) > 10 else 16.0, 4: 16.0}.get(width, 40.0)

    chosen = serve(true, [8] * 2000, 0.3)
    assert chosen[50:400].count(4) > 300
    assert chosen[-500:].count(1) > 450


def test_cost_of_widths_that_were_not_tried(monkeypatch):
    monkeypatch.setattr(costs, "STALE_COST_DECAY", 1.0)
    monkeypatch.setattr(costs, "CPU_COST_MARGIN", 1.0)
    cost = MeasuredCost(LENGTHS)
    take(cost, [(8, 1, 8.0), (8, 1, 8.0), (8, 4, 32.0), (8, 4, 32.0)])
    # Half of what rows have cost so far.
    assert cost(8, 8) == pytest.approx(32.0 + 4 * 4.0) and cost(5, 8) == pytest.approx(5 / 8 * cost(8, 8))
    # Wider ones wait until that is known.
    assert cost(8, 12) == math.inf
    take(cost, [(8, 8, 40.0), (8, 8, 40.0)])
    assert cost(8, 12) == pytest.approx(40.0 + 4 * 2.0)


def test_a_gpu_of_unknown_bandwidth(monkeypatch, caplog):
    """Triton knows a GPU's bandwidth from its driver, which reports 0 for some."""
    monkeypatch.setattr(controller, "get_dram_gbps", lambda: 0)
    assert controller.seconds_per_kv_token(1000.0) == 0.0
    assert "no memory bandwidth" in caplog.text
    monkeypatch.setattr(controller, "get_dram_gbps", lambda: 20.0)
    assert controller.seconds_per_kv_token(1000.0) == pytest.approx(5e-8)


def test_replays_correct_the_durations_of_start_up():
    """Trees of 8 nodes are the best. At start-up each node beyond the fourth seemed to cost twice what it does."""
    rates = [1.0, 0.7, 0.55, 0.4, 0.25, 0.2, 0.2, 0.2] + [0.05] * 8
    lengths = tree_lengths(16)
    started = {1: 4.0, 4: 5.2, 8: 7.8, 16: 13.0}
    real = {1: 4.0, 4: 5.5, 8: 6.7, 16: 9.3}
    measured = MeasuredReplays()
    chooser = LengthChooser(
        lengths, lambda bs, length: started[length] * measured.factor(bs, length), TreeAcceptance(16, 16)
    )
    draw, chosen = random.Random(0), []
    for _ in range(3000):
        chosen.append(chooser.choose(1))
        chooser.completed([0], AcceptedInTrees(tree_result(draw, chosen[-1], 1, rates), [], 1))
        measured.add(1, chosen[-1], real[chosen[-1]] / started[chosen[-1]])
    assert chosen[1000:].count(8) > 0.8 * 2000


@pytest.mark.parametrize(("kv_seconds", "factor"), [(0.0, 1.5), (0.004, 1.1), (0.0149, 0.1), (0.02, 0.1)])
def test_contexts_that_are_read_faster_than_thought(kv_seconds, factor):
    """Layers with windows read less. A cost of nothing, or less, would have its length chosen for ever."""
    assert controller.replay_factor(0.015, kv_seconds, 0.01) == pytest.approx(factor)


def test_factors_of_replays():
    measured = MeasuredReplays()
    assert measured.factor(8, 16) == 1.0
    # A few replays may have been slow by chance.
    for _ in range(FEWEST_REPLAYS - 1):
        measured.add(8, 4, 3.0)
    assert measured.factor(8, 4) == 1.0
    for _ in range(REPLAY_SAMPLES):
        measured.add(8, 4, 1.25)
        measured.add(1, 16, 0.5)
    # A median of a few may be too slow by chance.
    known, unknown = (1 - REPLAY_SPREAD / math.sqrt(samples) for samples in (REPLAY_SAMPLES, FEWEST_REPLAYS))
    assert measured.factor(8, 4) == measured.factor(5, 4) == pytest.approx(1.25 * known)
    # Batches of the same size, and then drafts of about the same length, are the most similar.
    assert measured.factor(8, 16) == pytest.approx(1.25 * unknown)
    assert measured.factor(1, 4) == measured.factor(2, 16) == pytest.approx(0.5 * unknown)
    for _ in range(REPLAY_SAMPLES):
        measured.add(8, 16, 2.0)
    assert measured.factor(8, 8) / unknown in (1.25, 2.0) and measured.factor(8, 12) == pytest.approx(2.0 * unknown)


class GpuClock:
    """Stands for the GPU: work that is launched runs after all earlier work."""

    def __init__(self, monkeypatch) -> None:
        self.host, self._free = 0.0, 0.0
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: GpuEvent(self))

    def launch(self, seconds: float) -> float:
        """Return when it ends."""
        self._free = max(self._free, self.host) + seconds
        return self._free


class GpuEvent:
    def __init__(self, clock: GpuClock) -> None:
        self._clock = clock

    def record(self) -> None:
        self._at = self._clock.launch(0.0)

    def query(self) -> bool:
        return self._clock.host >= self._at

    def elapsed_time(self, end: GpuEvent) -> float:
        return 1e3 * (end._at - self._at)


def timed(clock: GpuClock, timer: ReplayTimer, cycles: int, gpu_seconds: float, host_seconds: float) -> list:
    """Return what is read in cycles of four draft tokens. The host is at most one cycle ahead."""
    found, ends = [], [0.0, 0.0]
    for _ in range(cycles):
        clock.host = max(clock.host, ends[-2])
        found.append(timer.read())
        timer.begin(8, 4)
        ends.append(clock.launch(gpu_seconds))
        # The launch takes the host a while.
        clock.host += 0.5 * host_seconds
        timer.end(8, 4, expected=0.25)
        clock.host += 0.5 * host_seconds
    return [entry for entry in found if entry is not None]


def test_replays_are_timed_while_the_gpu_is_busy(monkeypatch):
    clock = GpuClock(monkeypatch)
    busy = timed(clock, ReplayTimer(steps_per_sample=4), 41, gpu_seconds=2.0, host_seconds=1.0)
    assert busy == [(8, 4, 0.25, 2.0)] * 10


def test_replays_that_the_gpu_waits_for_are_not_timed(monkeypatch):
    clock = GpuClock(monkeypatch)
    assert timed(clock, ReplayTimer(steps_per_sample=4), 40, gpu_seconds=0.5, host_seconds=1.0) == []
