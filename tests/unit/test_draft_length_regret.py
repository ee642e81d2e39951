"""Loss of an adaptive draft length against the best fixed one, in simulated time.

Drafts are those of a real drafter (scripts/bench/smollm2_drafts.safetensors), and harder texts accept fewer of them.
Durations of cycles are lines through what GPUs were measured to take (scripts/results).
"""

import random
from collections import Counter
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from bench.pairs import REPO
from safetensors import safe_open

from sglang_dflash import ops
from sglang_dflash.engine.adaptive.acceptance import TreeAcceptance, tree_lengths
from sglang_dflash.engine.adaptive.controller import CYCLES_PER_CHOICE, LengthChooser
from sglang_dflash.engine.metrics import AcceptedInTrees
from sglang_dflash.ops.bigrams import tables_of
from sglang_dflash.types import DrawParameters, Trees

FILE = REPO / "scripts" / "bench" / "smollm2_drafts.safetensors"
NUM_CANDIDATES, NUM_NODES = 16, 32
# Of the throughput of the best fixed length.
MAX_REGRET = 0.01

# Milliseconds of a cycle by verified tokens of the batch, and of plain decoding by requests.
# qwen3-8b-trees_h100_2026-11-23.md, qwen3-8b-adaptive_h100_2026-11-23.md, serving-qwen3-8b_h100_2026-11-24.md.
DENSE = {16: 7.4, 128: 8.8, 256: 11.8, 512: 18.0}, {1: 6.6, 8: 7.0, 32: 7.75}
# qwen3.5-9b-trees-fa3_h100_2026-11-25.md, qwen3.5-9b-adaptive_h100_2026-11-24.md; plain decoding is estimated.
HYBRID = {16: 8.1, 32: 8.6, 128: 10.2, 256: 14.1, 512: 22.1, 1024: 38.0}, {1: 7.2, 8: 7.6, 32: 9.0}
# qwen3-30b-a3b-acceptance5_h200_2026-11-23.md; tokens of one request load experts of their own.
MIXTURE = {4: 4.9, 16: 6.0, 128: 9.2, 256: 10.5, 512: 12.3}, {1: 3.7, 8: 8.7, 32: 14.8}
TABLES = {"dense": DENSE, "hybrid": HYBRID, "mixture": MIXTURE}
# Shares of their accepted drafts that requests keep, by turns.
TEXTS = {"easy": [1.0], "mixed": [1.0, 0.4], "hard": [0.3], "hopeless": [0.02]}
# Small batches of the dense target have trees of 32.
LENGTHS, ALL_LENGTHS = tree_lengths(16), tree_lengths(NUM_NODES)


def on_line(table: dict[int, float], at: float) -> float:
    points = list(table.items())
    (a, first), (b, second) = next((pair for pair in pairwise(points) if at <= pair[1][0]), (points[-2], points[-1]))
    return max(points[0][1], first + (second - first) * (at - a) / (b - a))


def milliseconds(name: str, bs: int, length: int) -> float:
    tokens, plain = TABLES[name]
    return on_line(plain, bs) if length == 1 else on_line(tokens, bs * length)


def durations(name: str, bs: int) -> dict[int, float]:
    """Return milliseconds of a cycle by the lengths that a server chooses from."""
    lengths = ALL_LENGTHS if name == "dense" and bs <= 4 else LENGTHS
    return {length: milliseconds(name, bs, length) for length in lengths}


@pytest.fixture(scope="module")
def paths() -> list[list[list[int]]]:
    """By answer and token: the accepted nodes of the tree that begins there. A smaller tree has the first ones."""
    with safe_open(FILE, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return [accepted_nodes(tensors, answer) for answer in range(len(tensors["num_tokens"]))]


def accepted_nodes(tensors: dict[str, torch.Tensor], answer: int) -> list[list[int]]:
    num_tokens, text = int(tensors["num_tokens"][answer]), tensors["answers"][answer].long()
    candidates = tensors["candidates"][answer, :num_tokens, :, :NUM_CANDIDATES].long().contiguous()
    log_probs = tensors["sixteenths"][answer, :num_tokens, :, :NUM_CANDIDATES].float() / -16
    labels = F.pad(text[1:].unfold(0, candidates.shape[1], 1)[:num_tokens], (0, 1), value=-1)
    zeros, own_rows = torch.zeros(num_tokens, dtype=torch.int64), torch.arange(num_tokens)
    tables = tables_of(text.clamp(min=0).expand(num_tokens, -1), own_rows + 1)
    greedy, log_sums = DrawParameters.greedy(num_tokens, zeros.device), torch.zeros(candidates.shape[:2])
    table = ops.fill_table(candidates, log_probs, log_sums, greedy, zeros, tables, zeros, zeros, own_rows)
    trees = Trees.empty(num_tokens, NUM_NODES, zeros.device)
    slots = torch.zeros((num_tokens, NUM_NODES), dtype=torch.int32)
    ops.grow_trees(zeros, candidates, *table, zeros, zeros, own_rows, slots, trees)
    tokens, depths = (rows.view(num_tokens, NUM_NODES) for rows in (trees.tokens, trees.positions))
    accepted, walked = ops.accept_paths(tokens, trees.parents, labels.gather(1, depths), zeros, labels.shape[1])
    lengths = accepted.accept_lens.tolist()
    return [path[1:length] for path, length in zip(walked.tolist(), lengths, strict=True)]


class Request:
    """Writes recorded answers from random places on."""

    def __init__(self, draw: random.Random, paths: list, kept: float) -> None:
        self._draw, self._paths, self.kept = draw, paths, kept
        self._begin()

    def _begin(self) -> None:
        self._answer = self._draw.choice(self._paths)
        self._at = self._draw.randrange(len(self._answer) // 2)

    def verify(self, num_nodes: int) -> list[int]:
        """Return the accepted nodes of the next cycle."""
        accepted = []
        for node in self._answer[self._at]:
            if node >= num_nodes or self._draw.random() > self.kept:
                break
            accepted.append(node)
        self._at += 1 + len(accepted)
        if self._at >= len(self._answer):
            self._begin()
        return accepted


@pytest.fixture(scope="module")
def tokens_per_cycle(paths) -> dict[tuple[str, int], float]:
    """Tokens that cycles of one length commit, by text and length."""
    return {(name, length): mean_tokens(paths, kept, length) for name, kept in TEXTS.items() for length in ALL_LENGTHS}


def mean_tokens(paths: list, kept: list[float], length: int) -> float:
    draw = random.Random(1)
    requests = [Request(draw, paths, kept[i % len(kept)]) for i in range(32)]
    verified = [1 + len(request.verify(length)) for _ in range(3000) for request in requests]
    return sum(verified) / len(verified)


class Server:
    """Chooses lengths as a server does: two cycles are in flight, and counts come as `TreeCounts` copies them.

    Attributes:
        chosen: how often each length was chosen.
    """

    def __init__(self, bs: int, seconds: dict[int, float]) -> None:
        self._bs, self.chosen = bs, Counter()
        lengths = sorted(seconds)
        acceptance = TreeAcceptance(lengths[-1], 16, CYCLES_PER_CHOICE)
        self._chooser = LengthChooser(lengths, lambda _, length: seconds[length], acceptance, CYCLES_PER_CHOICE)
        self._counts, self._counted, self._last = {length: [0] * length for length in lengths}, Counter(), 0
        self._in_flight = []

    def verify(self, requests: list[Request]) -> tuple[int, int]:
        """Run a cycle, and return its length and the tokens that it committed."""
        length = self._chooser.reuse_choice(self._bs) or self._chooser.choose(self._bs)
        self.chosen[length] += 1
        copied, nodes, tokens = None, self._counts[length], self._bs
        nodes[0] += self._bs
        for request in requests:
            accepted = request.verify(length)
            tokens += len(accepted)
            for node in accepted:
                nodes[node] += 1
        if length > 1:
            self._counted[length] += 1
            if length != self._last or self._counted[length] >= CYCLES_PER_CHOICE:
                copied, self._counts[length] = AcceptedInTrees(nodes, [], self._counted.pop(length)), [0] * length
        self._last = length
        self._in_flight.append(copied)
        if len(self._in_flight) > 1:
            self._chooser.completed([0] * self._bs, self._in_flight.pop(0))
        return length, tokens


def adapt(paths: list, texts: list[float], bs: int, seconds: dict[int, float], cycles: int) -> Counter[int]:
    """Serve cycles of requests that go on forever; how often lengths were chosen."""
    draw, server = random.Random(2), Server(bs, seconds)
    requests = [Request(draw, paths, texts[i % len(texts)]) for i in range(bs)]
    for cycle in range(cycles):
        if cycle == 10 * CYCLES_PER_CHOICE:
            # At first all lengths are tried, which takes time once.
            server.chosen.clear()
        server.verify(requests)
    return server.chosen


@pytest.mark.parametrize("bs", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("texts", TEXTS)
@pytest.mark.parametrize("name", TABLES)
def test_regret(paths, tokens_per_cycle, name, texts, bs):
    """Less than 1 % is lost against any fixed length, no drafting among them."""
    seconds = durations(name, bs)
    chosen = adapt(paths, TEXTS[texts], bs, seconds, cycles=12000 // bs + 2000)
    rates = {length: tokens_per_cycle[texts, length] / seconds[length] for length in seconds}
    total = sum(seconds[length] * count for length, count in chosen.items())
    rate = sum(tokens_per_cycle[texts, length] * count for length, count in chosen.items()) / total
    best = max(rates, key=rates.__getitem__)
    print(f"\n{name}, {texts}, {bs}: best {best}, regret {1 - rate / rates[best]:.4f}, {dict(sorted(chosen.items()))}")
    assert rate > (1 - MAX_REGRET) * rates[best]


def one_client(paths: list, seed: int, seconds: dict[int, float], length: int | None = None) -> float:
    """Answer 60 requests of 256 tokens, one after the other, easy and hard ones; tokens per time.

    Args:
        length: of all cycles; None: it adapts.
    """
    server, total, tokens = Server(1, seconds), 0.0, 0
    for i, kept in enumerate(random.Random(seed).choices([1.0, 0.8, 0.5, 0.02], k=60)):
        request, written = Request(random.Random(1000 * seed + i), paths, kept), 0
        while written < 256:
            used, committed = server.verify([request]) if length is None else (length, 1 + len(request.verify(length)))
            written += committed
            total += seconds[used]
        tokens += written
    return tokens / total


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_one_client(paths, name):
    """One request tells little in the cycles until the next one begins, which may be easier or harder."""
    # qwen3.5-35b-a3b-adaptive_h200_2026-11-27.md: three lengths are nearly as good on easy texts.
    experts = {1: 4.0, 4: 5.4, 8: 6.6, 16: 8.0}
    seconds = experts if name == "experts" else durations(name, 1)
    seeds = range(10)
    fixed = {length: sum(one_client(paths, seed, seconds, length) for seed in seeds) for length in seconds}
    adapted = sum(one_client(paths, seed, seconds) for seed in seeds)
    print(f"\n{name}: {adapted / max(fixed.values()):.4f} of the best, {max(fixed, key=fixed.get)}")
    assert adapted > 0.985 * max(fixed.values())
