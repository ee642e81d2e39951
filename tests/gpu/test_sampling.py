"""Sampling on a GPU: continuations have the target's exact distribution, through graphs, batches and overlap."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from engines import COMMON
from support.engine_process import run
from support.sampled import FIRST, NUM_NEW, SETTINGS, START, TABLE, VOCAB, p_value, write_sampled_pair

# Continuations of each setting.
NUM_WANTED = 50_000
NUM_RUNNING, NUM_CHAINS, CHAIN_LENGTH = 512, 1024, 500
# Requests of settings whose distribution depends on all generated tokens: one continuation per request.
ALONE = ("penalties", "repetition, bias and stop")
# An Engine answers about 400 requests per second on any GPU, and waits for its host between cycles. So several Engines
# share the work.
NUM_ENGINES = 4
# One false alarm in 900 runs of this file.
SIGNIFICANCE = 1e-4
ENGINE = COMMON | {
    "max_total_tokens": 1_100_000,
    "max_running_requests": NUM_RUNNING,
    "cuda_graph_bs_decode": [32, 128, 256, NUM_RUNNING],
}
# The drafter's blocks have 4 tokens, and its vocabulary 5.
SHAPES = {
    "chains": {"speculative_eagle_topk": 1},
    "trees": {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8},
}


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("pair")
    target, drafter = write_sampled_pair(folder)
    return ENGINE | {
        "model_path": str(target),
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(drafter),
    }


def ask_in_parallel(folder: Path, engines: list[dict], calls: list[list[dict]]) -> list[list]:
    """Return the answers of several Engines at a time, each to its calls."""

    def ask(number: int) -> list:
        of_engine = folder / str(number)
        of_engine.mkdir()
        answers, described = run(of_engine, engines[number], calls[number])
        assert described["worker"] == "DFlashWorker"
        has_trees = engines[number]["speculative_eagle_topk"] > 1
        assert described["verified_as"] == ("trees" if has_trees else "chains")
        return answers

    with ThreadPoolExecutor(len(engines)) as threads:
        return list(threads.map(ask, range(len(engines))))


def call(name: str, num_prompts: int, new_tokens: int) -> dict:
    """Return arguments of `Engine.generate`. `FIRST` follows each prompt; the tokens before it make drafts differ."""
    draw = random.Random(0)
    prompts = [[*draw.choices(range(VOCAB), k=draw.randint(0, 9)), START] for _ in range(num_prompts)]
    return {"input_ids": prompts, "sampling_params": SETTINGS[name] | {"max_new_tokens": new_tokens}}


def continuations(output_ids: list[int]) -> list[list[int]]:
    """Return what follows each `FIRST`. Every such continuation is independent of the tokens before it."""
    found, i = [], 0
    while i + NUM_NEW < len(output_ids):
        if output_ids[i] == FIRST:
            found.append(output_ids[i + 1 : i + 1 + NUM_NEW])
            i += NUM_NEW
        else:
            i += 1
    return found


def check(name: str, shape: str, answers: list[dict]) -> torch.Tensor:
    """Return the continuations in these answers, [continuations, NUM_NEW]; check that they have the distribution."""
    found = [continuations(answer["output_ids"]) for answer in answers]
    tokens = torch.tensor(list(itertools.chain.from_iterable(found)))
    decoded = sum(len(answer["output_ids"]) - 1 for answer in answers)
    cycles = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    p = p_value(SETTINGS[name], tokens)
    print(f"\n{name}, {shape}: {len(tokens)} continuations, {decoded / cycles:.2f} tokens per cycle, p = {p:.4f}")
    assert len(tokens) >= NUM_WANTED
    # Some drafts are accepted and some are refused.
    assert 1.1 < decoded / cycles < 3.9
    assert p > SIGNIFICANCE
    return tokens


@pytest.mark.gpu
@pytest.mark.group("sampling-trees")
def test_distribution(pair, tmp_path):
    names = [name for name in SETTINGS if name not in ALONE]
    of_engines = [names[number::NUM_ENGINES] for number in range(NUM_ENGINES)]
    calls = [[call(name, NUM_CHAINS, CHAIN_LENGTH) for name in of_engine] for of_engine in of_engines]
    answers = ask_in_parallel(tmp_path, [pair | SHAPES["trees"]] * NUM_ENGINES, calls)

    tokens = {}
    for of_engine, of_calls in zip(of_engines, answers, strict=True):
        tokens |= {name: check(name, "trees", of_call) for name, of_call in zip(of_engine, of_calls, strict=True)}
    # The test would notice if one unlikely draft in a hundred were accepted without a check.
    biased = tokens["temperature 1"].clone()
    biased[::100, 0] = TABLE[FIRST].argmin()
    assert p_value(SETTINGS["temperature 1"], biased) < SIGNIFICANCE


@pytest.mark.gpu
@pytest.mark.group("sampling-answers")
def test_distribution_of_whole_answers(pair, tmp_path):
    """These requests have chains where others have trees."""
    engines = [
        pair | SHAPES["trees"] | {"max_total_tokens": 30_000, "random_seed": seed} for seed in range(NUM_ENGINES)
    ]
    asked = [call(name, NUM_WANTED // NUM_ENGINES, 1 + NUM_NEW) for name in ALONE]
    answers = ask_in_parallel(tmp_path, engines, [asked] * NUM_ENGINES)
    for i, name in enumerate(ALONE):
        check(name, "chains", [answer for of_calls in answers for answer in of_calls[i]])


@pytest.mark.gpu
@pytest.mark.group("sampling-chains")
def test_distribution_of_chains(pair, tmp_path):
    """With overlap scheduling and without."""
    names = ["temperature 1", "top_k and top_p"]
    chains = pair | SHAPES["chains"]
    calls = [call(name, NUM_CHAINS, CHAIN_LENGTH) for name in names]
    answers = ask_in_parallel(tmp_path, [chains, chains | {"disable_overlap_schedule": True}], [calls, calls[:1]])
    for of_calls in answers:
        for name, of_call in zip(names, of_calls):
            check(name, "chains", of_call)
