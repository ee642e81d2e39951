"""Sampled answers of the fast path are a function of prompt, parameters and seed, whatever is drafted."""

from dataclasses import replace

import pytest
import torch
from serving import DEFAULT, REQUESTS_TREES, RETRACT, SMALL_POOL, Settings, trees
from support.oracle.drafter import ReferenceDrafter
from training.cycles import CHAIN, Draws
from training.tiny.report import cycles_of
from transformers import AutoModelForCausalLM

from models.tiny import DRAFTER_DIR, TARGET_DIR
from sglang_dflash.ops.reference.row_max import row_max
from sglang_dflash.ops.reference.sample_rows import sample_rows
from sglang_dflash.types import DrawParameters

RETRACTED = Settings("kept-noise-retracted", flags=SMALL_POOL, dflash_flags=trees(8), env=RETRACT)
ADAPTIVE = Settings("adaptive", dflash_flags=(("speculative-adaptive", True),))
KINDS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 0.7},
]
NEW_TOKENS = 40

pytestmark = pytest.mark.cpu(
    reason="on CUDA servers of float32 draw seeded tokens by SGLang's own rules; see tests/gpu"
)


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(TARGET_DIR, dtype=torch.float32).eval()


@torch.inference_mode()
def sampled(target, input_ids: list[int], seed: int, options: dict) -> list[int]:
    """Return what a request draws, token by token, without any draft."""
    parameters = DrawParameters(
        torch.tensor([options["temperature"]]),
        torch.tensor([options.get("top_k", 1 << 30)], dtype=torch.int32),
        torch.tensor([options.get("top_p", 1.0)]),
        torch.tensor([options.get("min_p", 0.0)]),
    )
    ids, cache = torch.tensor([input_ids]), None
    tokens: list[int] = []
    for position in range(len(input_ids) - 1, len(input_ids) - 1 + NEW_TOKENS):
        output = target(ids, past_key_values=cache, use_cache=True)
        logits, cache = output.logits[:, -1], output.past_key_values
        maxima, drawn = row_max(logits)
        sample_rows(logits, maxima, drawn, parameters, torch.tensor([seed]), torch.tensor([position]))
        tokens.append(int(drawn))
        ids = drawn[:, None]
    return tokens


@pytest.mark.parametrize("settings", [DEFAULT, REQUESTS_TREES, RETRACTED, ADAPTIVE], indirect=True, ids=str)
def test_answers_are_a_function_of_their_seed(settings, pair, prompts, target):
    """Chains, trees, adaptive lengths and retraction, greedy requests and requests of SGLang's sampler beside."""
    requests = [
        {"input_ids": prompts[i], "max_new_tokens": NEW_TOKENS, "ignore_eos": True, "sampling_seed": 2**40 + i}
        | KINDS[i % len(KINDS)]
        for i in range(8)
    ]
    others = [{"input_ids": prompts[9], "max_new_tokens": 30}, {"input_ids": prompts[10], "presence_penalty": 0.5}]

    answers = pair.dflash.generate_concurrently([*requests, *others])[: len(requests)]

    for request, answer in zip(requests, answers):
        assert answer["output_ids"] == sampled(target, request["input_ids"], request["sampling_seed"], request)
    cycles = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert cycles < len(requests) * (NEW_TOKENS - 1)
    if settings == RETRACTED:
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0


@pytest.mark.parametrize("settings", [DEFAULT], indirect=True, ids=str)
def test_chains_follow_the_noise(pair, prompts, target):
    """Cycles of sampled requests accept what a table with their noise accepts, and that is more than without it."""
    drafter = ReferenceDrafter.from_pretrained(DRAFTER_DIR, torch.float32)
    requests = [
        {"input_ids": prompts[i], "max_new_tokens": 60, "ignore_eos": True, "sampling_seed": 7 + i, "temperature": 0.7}
        for i in range(6)
    ]

    answers = pair.dflash.generate_concurrently(requests)

    counts = []
    for request, answer in zip(requests, answers, strict=True):
        draws = Draws.of(torch.tensor([request["sampling_seed"]]), request["temperature"])
        texts = request["input_ids"], answer["output_ids"]
        cycles, without = cycles_of(target, drafter, *texts, draws, [CHAIN, replace(CHAIN, has_noise=False)])
        counts.append((answer["meta_info"]["spec_verify_ct"], len(cycles), len(without)))
    served, expected, without_noise = zip(*counts, strict=True)
    assert served == expected
    assert sum(served) < sum(without_noise)


@pytest.mark.parametrize("settings", [DEFAULT], indirect=True, ids=str)
def test_samples_of_one_request_differ(pair, prompts):
    """They share its seed, so it is not their key."""
    request = {"input_ids": prompts[4], "max_new_tokens": 40, "temperature": 1.0, "ignore_eos": True}
    answers = pair.dflash.generate(**request, sampling_seed=5, n=3)
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 3
