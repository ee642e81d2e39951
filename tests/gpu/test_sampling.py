"""Sampling on a GPU: continuations have the target's exact distribution, through graphs, batches and overlap."""

import itertools
import random

import pytest
import torch
from engine_process import run
from sampled import FIRST, NUM_NEW, SETTINGS, START, TABLE, VOCAB, p_value, write_sampled_pair

# Continuations of each setting.
NUM_WANTED = 200_000
NUM_RUNNING, NUM_CHAINS, CHAIN_LENGTH = 512, 1024, 1900
# Where the distribution depends on all that was generated, each continuation takes a request.
ALONE = ("penalties", "repetition, bias and stop")
# Each in an Engine of its own, so that they can be run side by side.
_TOGETHER = [name for name in SETTINGS if name not in ALONE]
GROUPS = [_TOGETHER[:4], _TOGETHER[4:], *([name] for name in ALONE)]
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
        "speculative_draft_model_path": str(drafter),
    }


def call(name: str) -> dict:
    """Arguments of `Engine.generate`: `FIRST` follows each prompt, and what comes before makes drafts differ."""
    draw = random.Random(0)
    alone = name in ALONE
    return {
        "input_ids": [
            [*draw.choices(range(VOCAB), k=draw.randint(0, 9)), START]
            for _ in range(NUM_WANTED if alone else NUM_CHAINS)
        ],
        "sampling_params": SETTINGS[name] | {"max_new_tokens": 1 + NUM_NEW if alone else CHAIN_LENGTH},
    }


def continuations(output_ids: list[int]) -> list[list[int]]:
    """What follows `FIRST`, again and again: each is independent of all that came before it."""
    found, i = [], 0
    while i + NUM_NEW < len(output_ids):
        if output_ids[i] == FIRST:
            found.append(output_ids[i + 1 : i + 1 + NUM_NEW])
            i += NUM_NEW
        else:
            i += 1
    return found


def check(name: str, answers: list[dict]) -> torch.Tensor:
    """Continuations in these answers, [N, NUM_NEW], which have the distribution."""
    found = [continuations(answer["output_ids"]) for answer in answers]
    tokens = torch.tensor(list(itertools.chain.from_iterable(found)))
    decoded = sum(len(answer["output_ids"]) - 1 for answer in answers)
    cycles = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    p = p_value(SETTINGS[name], tokens)
    print(f"\n{name}: {len(tokens)} continuations, {decoded / cycles:.2f} tokens per cycle, p = {p:.4f}")
    assert len(tokens) >= NUM_WANTED
    # Drafts are kept, and drafts are refused.
    assert 1.1 < decoded / cycles < 3.5
    assert p > SIGNIFICANCE
    return tokens


@pytest.mark.gpu
@pytest.mark.parametrize("names", GROUPS, ids=[names[0] for names in GROUPS])
def test_distribution(names, pair, tmp_path):
    answers, described = run(tmp_path, pair | ENGINE, [call(name) for name in names])

    assert described["worker"] == "DFlashWorker"
    for name, answers_of_one in zip(names, answers, strict=True):
        tokens = check(name, answers_of_one)
        # The test would notice if one unlikely draft in a hundred were kept without asking.
        if name == "temperature 1":
            tokens[::100, 0] = TABLE[FIRST].argmin()
            assert p_value(SETTINGS[name], tokens) < SIGNIFICANCE


@pytest.mark.gpu
def test_distribution_without_overlap(pair, tmp_path):
    answers, _ = run(tmp_path, pair | ENGINE | {"disable_overlap_schedule": True}, [call("temperature 1")])

    check("temperature 1", answers[0])
