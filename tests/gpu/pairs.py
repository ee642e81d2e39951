"""Calls to trained pairs, and checks of their answers and records, for the tests of pairs."""

from __future__ import annotations

from collections import defaultdict

from engines import GRAPH_SIZES, EngineConfig, Engines, greedy, tiny
from support.ties import Comparison, compare, tokens_per_cycle

NEW_TOKENS = 128
# Context limit of `scheduling_calls`: not a multiple of any page size, nor of any kernel's tile.
CONTEXT = 601
# Tokens per cycle of the same prompts on the CPU in float32 (scripts/results/tiny_pair.md): 60 x 127 tokens. Trees have
# 16 nodes and 16 candidates per position.
CPU_TOKENS_PER_CYCLE = {"chains": 5.234, "trees": 6.597}

# Two logits this close may change places. The target's logits reach 32 to 64, where neighbouring bf16 numbers are 0.25
# apart, and verification runs more rows at a time than decoding.
TIE = 0.25


def plain(backend: str) -> EngineConfig:
    """Return the Engine without speculation that others are compared with."""
    return tiny(f"tiny-{backend}-plain", attention_backend=backend)


def pair_calls(prompts: list[list[int]]) -> list[dict]:
    """Return calls for long answers to all prompts, 8 at a time."""
    return [greedy(prompts[i : i + 8], NEW_TOKENS, flush=i == 0) for i in range(0, len(prompts), 8)]


def varied_calls(prompts: list[list[int]]) -> list[dict]:
    """Return the same calls with answers of 16 to 128 tokens: the running batch gets every size."""
    calls = pair_calls(prompts)
    for call in calls:
        for i, sampling in enumerate(call["sampling_params"]):
            sampling["max_new_tokens"] = 16 * (1 + i % 8)
    return calls


def scheduling_calls(prompts: list[list[int]]) -> dict[str, dict]:
    """Return calls by what they have a scheduler do; 8 requests each."""
    text = sum(prompts, [])
    some = prompts[:8]
    long = [text[500 * i : 500 * i + 480 + 7 * i] for i in range(4)]
    return {
        "several at once": greedy(some, [100 - 8 * i for i in range(8)], flush=True),
        # Their prompts and the first answers are in the radix cache by now.
        "again": greedy([[*prompt, 300 + i] for i, prompt in enumerate(some)], 60),
        "in chunks": greedy([*long, *prompts[8:12]], 40),
        # Long requests end at the context limit at the same time, and short ones continue.
        "to the limit": greedy([*long, *prompts[12:16]], [CONTEXT - len(p) for p in long] + [200] * 4),
        "beside aborted ones": greedy(prompts[16:24], 150),
        "into a full pool": greedy(prompts[:8], 300, flush=True),
    }


def plain_answers(engines: Engines, backend: str, prompts: list[list[int]]) -> tuple[list[dict], list[list[dict]]]:
    """Return what the tiny target writes alone: the answers to `pair_calls`, and those to each of `scheduling_calls`.

    One Engine of each backend answers all of them.
    """
    of_pair, scheduled = pair_calls(prompts), scheduling_calls(prompts)
    answers = engines.reference(plain(backend), [*of_pair, *scheduled.values()])
    return flat(answers[: len(of_pair)]), answers[len(of_pair) :]


def flat(of_calls: list[list[dict]]) -> list[dict]:
    return [answer for answers in of_calls for answer in answers]


def usual(comparison: Comparison, number: int) -> int:
    """Return the usual number of identical texts, for as many as there are. On a CPU there are fewer."""
    return number * comparison.total // 60


def check_texts(engines: Engines, config: EngineConfig, of_plain: list, calls: list[dict]) -> tuple[Comparison, float]:
    """Return the comparison of texts, and tokens per cycle."""
    answers = flat(engines.ask(config, calls))
    compared, rate = compare(of_plain, answers), tokens_per_cycle(answers)
    print(f"\n{config}: {compared}, {rate:.3f} tokens per cycle")
    return compared, rate


def check_replays(name: str, shape: str, records: list[dict]) -> None:
    seen = defaultdict(list)
    for entry in records:
        seen[entry["stage"], entry["bs"], entry["graph_bs"]].append(entry)
    padded = {bs: min(size for size in GRAPH_SIZES if size >= bs) for bs in range(1, 9)}
    assert set(seen) == {(stage, *sizes) for stage in ("draft", "verify") for sizes in padded.items()}
    for stage in ("draft", "verify"):
        entries = [entry for key, of_key in seen.items() if key[0] == stage for entry in of_key]
        hidden, states = (max(entry[name] or 0.0 for entry in entries) for name in ("hidden_error", "state_error"))
        wrong = sum(entry["different_tokens"] for entry in entries) / sum(entry["tokens"] for entry in entries)
        errors = f"hidden error {hidden:.1e}, state error {states:.1e}"
        print(f"\n{name}, {stage}: {len(entries)} cycles, {errors}, tokens apart {wrong:.2%}")
        # bf16 rounding, if a planner splits the same attention differently. A wrong mask or slot exceeds it by far.
        assert hidden < 2e-2
        assert states < 2e-2
        # Of trees, another order of two candidates changes nodes.
        assert wrong < (5e-2 if (stage, shape) == ("draft", "trees") else 1e-2)
