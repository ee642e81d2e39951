"""The hybrid pair on a GPU in bf16: a target with recurrent layers, and a drafter that was trained for it.

test_hybrid_target.py has random targets of other classes.
"""

from dataclasses import replace

import pytest
from engines import BACKENDS, ON_CPU, EngineConfig, Engines, greedy, tiny
from pairs import (
    TIE,
    check_replays,
    check_texts,
    flat,
    pair_calls,
    usual,
    varied_calls,
)
from support.ties import compare, tokens_per_cycle
from transformers import AutoTokenizer

from models.hybrid import DRAFTER_DIR, TARGET_DIR
from models.tiny import load_prompts

# Tokens per cycle of the same prompts on the CPU in float32 (scripts/results/hybrid_pair.md).
CPU_TOKENS_PER_CYCLE = 3.172
# Usual numbers of identical texts, of 60.
USUAL = {
    ("fa3", "chains"): 53,
    ("flashinfer", "chains"): 46,
    ("triton", "chains"): 49,
    ("fa3", "trees"): 51,
    ("flashinfer", "trees"): 47,
    ("triton", "trees"): 50,
}
# More tokens of the first texts.
CONTINUED = 60
# Trees are the default.
SHAPES = {"chains": {"speculative_eagle_topk": 1}, "trees": {}}


def hybrid(name: str, shape: str | None, **flags) -> EngineConfig:
    """Return a configuration of the hybrid pair; `shape`: None for no speculation."""
    # By default SGLang would give states most of the memory.
    flags |= {"model_path": str(TARGET_DIR), "max_mamba_cache_size": 100}
    if shape is None:
        return tiny(name, **flags)
    return tiny(name, "trees", speculative_draft_model_path=str(DRAFTER_DIR), **SHAPES[shape] | flags)


def plain(backend: str) -> EngineConfig:
    return hybrid(f"hybrid-pair-{backend}-plain", None, attention_backend=backend)


def served(backend: str, shape: str) -> EngineConfig:
    config = hybrid(f"hybrid-pair-{backend}-{shape}", shape, attention_backend=backend)
    return replace(config, plugins=("graph_check", "sync_check"))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Return the tiny pair's prompts in this pair's tokens."""
    return AutoTokenizer.from_pretrained(TARGET_DIR)(load_prompts())["input_ids"]


def on_each_backend(test):
    """Run a test with trees and with chains on each backend, in the group of the backend."""
    for mark in (
        pytest.mark.parametrize("shape", SHAPES, indirect=True),
        pytest.mark.parametrize("backend", BACKENDS, indirect=True),
        pytest.mark.gpu,
        pytest.mark.rehearsed,
        pytest.mark.group("hybrid-pair-{backend}"),
    ):
        test = mark(test)
    return test


def references(engines: Engines, backend: str, prompts: list[list[int]]) -> tuple[list[dict], dict, list[dict]]:
    """Return what the target writes alone: its answers, a call that continues the first 8, and the answers to it."""
    of_plain = flat(engines.reference(plain(backend), pair_calls(prompts)))
    texts = [prompt + answer["output_ids"] for prompt, answer in zip(prompts[:8], of_plain)]
    # The same Engine answers both.
    [continued] = engines.reference(plain(backend), [greedy(texts, CONTINUED)])
    return of_plain, greedy(texts, CONTINUED), continued


@on_each_backend
def test_lossless_and_acceptance(backend, shape, engines, prompts):
    of_plain, _, _ = references(engines, backend, prompts)
    described = engines.describe(served(backend, shape))
    assert described["verified_rows"] == 16
    assert described["verified_as"] == shape
    assert described["recurrent_states"]["slots"] == 100

    compared, rate = check_texts(engines, served(backend, shape), of_plain, pair_calls(prompts))

    compared.assert_ties(TIE)
    compared.assert_floor(usual(compared, USUAL[backend, shape]))
    if ON_CPU:
        # A part of the prompts.
        return
    if shape == "chains":
        # Its texts differ from the CPU's earlier than the tiny pair's, and other texts have another acceptance.
        assert rate == pytest.approx(CPU_TOKENS_PER_CYCLE, rel=0.06)
    else:
        assert rate > CPU_TOKENS_PER_CYCLE


@on_each_backend
def test_replay_equals_eager(backend, shape, engines, prompts):
    """So are the recurrent states after the accepted path."""
    with engines.checking(served(backend, shape), "graph_check") as records:
        engines.ask(served(backend, shape), varied_calls(prompts))
    check_replays(f"hybrid pair, {backend}, {shape}", shape, records)
    verified = [entry for entry in records if entry["stage"] == "verify"]
    assert sum(entry["state_error"] is not None for entry in verified) > 0.5 * len(verified)


@on_each_backend
def test_host_does_not_wait(backend, shape, engines, prompts):
    with engines.checking(served(backend, shape), "sync_check") as cycles:
        answers = flat(engines.ask(served(backend, shape), varied_calls(prompts)))
    print(f"\n{len(cycles)} cycles without a wait, {tokens_per_cycle(answers):.3f} tokens per cycle")
    assert {cycle["bs"] for cycle in cycles} == set(range(1, 9))
    assert all(cycle["replayed"] for cycle in cycles)


@on_each_backend
def test_continued_texts(backend, shape, engines, prompts):
    """Texts go on from states that the prefix cache has kept on accepted paths."""
    _, asked, continued = references(engines, backend, prompts)
    engines.ask(served(backend, shape), pair_calls(prompts)[:1])
    [answers] = engines.ask(served(backend, shape), [asked])

    compared = compare(continued, answers)
    cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
    print(f"\n{backend}, {shape}: {compared}, {cached} tokens cached")
    compared.assert_ties(TIE)
    # Texts that differ from the target's own have fewer tokens in the cache.
    assert sum(tokens > len(prompt) for tokens, prompt in zip(cached, prompts)) >= 2
