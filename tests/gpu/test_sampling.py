"""Sampling on a GPU: continuations have the target's exact distribution, through graphs, batches and overlap."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.engine_process import run
from support.sampled import FIRST, NUM_NEW, SETTINGS, START, TABLE, VOCAB, p_value, write_sampled_pair

# Continuations of each setting.
NUM_WANTED = 200_000
NUM_RUNNING, NUM_CHAINS, CHAIN_LENGTH = 512, 1024, 1900
# Requests of settings whose distribution depends on all generated tokens: one continuation per request.
ALONE = ("penalties", "repetition, bias and stop")
# An Engine answers about 400 requests per second on any GPU, and waits for its host between cycles. So several Engines
# share the work.
NUM_ENGINES = 4
# One false alarm in 900 runs of this file.
SIGNIFICANCE = 1e-4
ENGINE = {
    "dtype": "bfloat16",
    "max_total_tokens": 1_100_000,
    "max_running_requests": NUM_RUNNING,
    "cuda_graph_bs_decode": [32, 128, 256, NUM_RUNNING],
    "disable_prefill_cuda_graph": True,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target, drafter = write_sampled_pair(folder)
    return {
        "model_path": str(target),
        "speculative_algorithm": "DFLASH",
        "speculative_eagle_topk": 1,
        "speculative_draft_model_path": str(drafter),
    }


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


def check(name: str, answers: list[dict]) -> torch.Tensor:
    """Return the continuations in these answers, [continuations, NUM_NEW]; check that they have the distribution."""
    found = [continuations(answer["output_ids"]) for answer in answers]
    tokens = torch.tensor(list(itertools.chain.from_iterable(found)))
    decoded = sum(len(answer["output_ids"]) - 1 for answer in answers)
    cycles = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    p = p_value(SETTINGS[name], tokens)
    print(f"\n{name}: {len(tokens)} continuations, {decoded / cycles:.2f} tokens per cycle, p = {p:.4f}")
    assert len(tokens) >= NUM_WANTED
    # Some drafts are accepted and some are refused.
    assert 1.1 < decoded / cycles < 3.5
    assert p > SIGNIFICANCE
    return tokens


@pytest.mark.gpu
def test_distribution(pair, tmp_path):
    names = [name for name in SETTINGS if name not in ALONE]

    def answers(number: int) -> list[list[dict]]:
        folder = tmp_path / str(number)
        folder.mkdir()
        calls = [call(name, NUM_CHAINS, CHAIN_LENGTH) for name in names[number::NUM_ENGINES]]
        of_calls, described = run(folder, pair | ENGINE, calls)
        assert described["worker"] == "DFlashWorker"
        return of_calls

    tokens = {}
    with ThreadPoolExecutor(NUM_ENGINES) as threads:
        for number, of_calls in enumerate(threads.map(answers, range(NUM_ENGINES))):
            of_engine = zip(names[number::NUM_ENGINES], of_calls, strict=True)
            tokens |= {name: check(name, of_one) for name, of_one in of_engine}
    # The test would notice if one unlikely draft in a hundred were accepted without a check.
    biased = tokens["temperature 1"].clone()
    biased[::100, 0] = TABLE[FIRST].argmin()
    assert p_value(SETTINGS["temperature 1"], biased) < SIGNIFICANCE


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALONE)
def test_distribution_of_whole_answers(name, pair, tmp_path):
    def answers(seed: int) -> list[dict]:
        folder = tmp_path / str(seed)
        folder.mkdir()
        engine = pair | ENGINE | {"max_total_tokens": 30_000, "random_seed": seed}
        return run(folder, engine, [call(name, NUM_WANTED // NUM_ENGINES, 1 + NUM_NEW)])[0][0]

    with ThreadPoolExecutor(NUM_ENGINES) as threads:
        check(name, list(itertools.chain.from_iterable(threads.map(answers, range(NUM_ENGINES)))))


@pytest.mark.gpu
def test_distribution_without_overlap(pair, tmp_path):
    calls = [call("temperature 1", NUM_CHAINS, CHAIN_LENGTH)]
    answers, _ = run(tmp_path, pair | ENGINE | {"disable_overlap_schedule": True}, calls)

    check("temperature 1", answers[0])


@pytest.mark.gpu
def test_distribution_of_trees(pair, tmp_path):
    names = ["temperature 1", "top_k and top_p"]
    trees = {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8}
    calls = [call(name, NUM_CHAINS, CHAIN_LENGTH) for name in names]
    answers, described = run(tmp_path, pair | ENGINE | trees, calls)

    assert (described["block_size"], described["verified_rows"]) == (4, 8)
    for name, of_one in zip(names, answers, strict=True):
        check(name, of_one)
