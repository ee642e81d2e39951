"""Requests of every kind on a GPU: penalties, grammars, logit processors, log probabilities, seeds, kept noise."""

from dataclasses import replace

import pytest
from engines import GRAPH_SIZES, IEEE, EngineConfig, Engines, greedy, tiny
from support.ties import compare, first_difference, tokens_per_cycle

# Largest error of a log probability in bf16, and of the distance of two. The target's logits reach 32 to 64, where
# neighbouring bf16 numbers are 0.25 apart. Most errors are much smaller.
TIE = 0.25
MEAN_ERROR = 0.02
# The same in float32: decoding and verification sum in another order.
EXACT_ERROR = 1e-3
NUM_REQUESTS, NEW_TOKENS = 32, 60

# Requests whose grammar ends have no `ignore_eos`: without speculation SGLang would write a token past the grammar.
GREEDY = [
    {},
    {"frequency_penalty": 0.7},
    {"presence_penalty": 0.9},
    {"repetition_penalty": 1.4},
    {"min_new_tokens": 40, "stop_token_ids": [200], "ignore_eos": False},
    {"logit_bias": {"263": 4.0, "200": -100}},
    {"custom_params": {"ngram_size": 3, "window_size": 100}},
    {"regex": r"(def [a-z]+\(\):\n    return [a-z]+\n)+", "ignore_eos": False},
]
SEEDED = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "presence_penalty": 0.5},
]
# Kinds that the cycle draws by itself.
DRAWN = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 0.7},
]
# Usual numbers of identical texts, of 32.
USUAL = {("triton", "chains"): 23, ("triton", "trees"): 17, ("fa3", "trees"): 17}

MANY = {
    "max_running_requests": NUM_REQUESTS,
    "cuda_graph_bs_decode": [8, NUM_REQUESTS],
    "enable_custom_logit_processor": True,
    "skip_server_warmup": True,
}
# Without speculation, overlap scheduling would apply penalties one token late.
SYNC = {"disable_overlap_schedule": True}


def requests(prompts: list[list[int]], kinds: list[dict], chosen: range = range(NUM_REQUESTS)) -> dict:
    """Return a call with a request of each kind in turn."""
    # Imported here: the process of the tests needs SGLang for nothing else.
    from sglang.srt.sampling.custom_logit_processor import DeepseekOCRNoRepeatNGramLogitProcessor

    of_requests = [kinds[i % len(kinds)] for i in chosen]
    call = greedy([prompts[i] for i in chosen], NEW_TOKENS, flush=True, return_logprob=True, top_logprobs_num=2)
    call["sampling_params"] = [
        params | {"sampling_seed": i} | kind for i, params, kind in zip(chosen, call["sampling_params"], of_requests)
    ]
    call["custom_logit_processor"] = [
        DeepseekOCRNoRepeatNGramLogitProcessor.to_str() if "custom_params" in kind else None for kind in of_requests
    ]
    return call


def log_probs(answer: dict) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def errors_before(want: dict, got: dict) -> list[float]:
    """Return the differences of log probabilities before the first token that differs."""
    differs = first_difference(want, got)
    return [abs(a - b) for a, b in zip(log_probs(got)[:differs], log_probs(want)[:differs])]


@pytest.mark.gpu
@pytest.mark.rehearsed
@pytest.mark.group("requests-{backend}")
@pytest.mark.parametrize(("backend", "shape"), USUAL)
def test_greedy(backend, shape, engines, prompts):
    """The tokens in bf16 are the same up to the first tie, and so are the log probabilities before it.

    Log probabilities are those after penalties, biases, processors and grammars. So a tie is between allowed tokens.
    With trees, these requests have chains, beside one in eight that has a tree.
    """
    asked = requests(prompts, GREEDY)
    if shape == "trees":
        # Log probabilities come from SGLang's sampler too.
        asked["return_logprob"] = [bool(GREEDY[i % len(GREEDY)]) for i in range(NUM_REQUESTS)]
    reference = tiny(f"requests-{backend}-plain", attention_backend=backend, **MANY, **SYNC)
    [of_plain] = engines.reference(reference, [requests(prompts, GREEDY)])
    config = tiny(f"requests-{backend}-{shape}", shape, attention_backend=backend, **MANY)
    [answers] = engines.ask(config, [asked])

    assert engines.describe(config)["worker"] == "DFlashWorker"
    compared = compare(of_plain, answers)
    with_log_probs = [pair for pair in zip(of_plain, answers) if "output_token_logprobs" in pair[1]["meta_info"]]
    errors = [error for pair in with_log_probs for error in errors_before(*pair)]
    mean = sum(errors) / len(errors)
    print(f"\n{config}: {compared}; log probabilities off by {mean:.4f} on average, {max(errors):.4f} at most")
    for (_, got), kind in zip(zip(of_plain, answers), GREEDY * 4):
        assert len(got["output_ids"]) == NEW_TOKENS or not kind.get("ignore_eos", True)
    compared.assert_ties(TIE)
    compared.assert_floor(USUAL[backend, shape])
    assert max(errors) <= TIE
    assert mean <= MEAN_ERROR


@pytest.mark.gpu
@pytest.mark.group("requests-triton")
def test_seeded(engines, prompts):
    """The samples in float32 are the same, unless one is within rounding of the boundary between two tokens.

    Rounding changes log probabilities by about 1e-5. So it affects about one sample in 1e5, and there are 1920.
    """
    # On CUDA, SGLang's norms take float32 only under deterministic inference.
    flags = {"attention_backend": "triton", "dtype": "float32", "enable_deterministic_inference": True} | MANY
    reference = replace(tiny("requests-seeded-plain", **flags, **SYNC), env=IEEE)
    # Without speculation, a seeded sample depends on whether another request of the batch has a filter.
    turns = len(SEEDED)
    calls = [requests(prompts, SEEDED, range(first, NUM_REQUESTS, turns)) for first in range(turns)]
    of_turns = engines.reference(reference, calls)
    of_plain = [of_turns[i % turns][i // turns] for i in range(NUM_REQUESTS)]
    config = replace(tiny("requests-seeded", "trees", **flags), env=IEEE)
    [answers] = engines.ask(config, [requests(prompts, SEEDED)])

    # Deterministic inference excludes trees.
    assert engines.describe(config)["verified_as"] == "chains"
    errors, partings = [], []
    for i, (want, got) in enumerate(zip(of_plain, answers, strict=True)):
        differs = first_difference(want, got)
        errors += errors_before(want, got)
        if differs is not None:
            partings.append(f"request {i} at {differs}: {log_probs(got)[differs]} for {log_probs(want)[differs]}")
    print(f"\n{NUM_REQUESTS - len(partings)} of {NUM_REQUESTS} identical; off by {max(errors):.1e} at most: {partings}")
    assert max(errors) <= EXACT_ERROR
    assert len(partings) <= 1
    assert tokens_per_cycle(answers) > 1


def kept_noise(shape: str) -> EngineConfig:
    """Return an Engine of float32, in which no token depends on the batch.

    It is not deterministic inference, whose seeded tokens SGLang's sampler draws. SGLang's CUDA kernels of norms take
    no float32.
    """
    flags = {"attention_backend": "triton", "dtype": "float32", "cuda_graph_bs_decode": [*GRAPH_SIZES, 16]}
    config = tiny(f"kept-noise-{shape}", shape, max_running_requests=16, **flags)
    return replace(config, env=IEEE | {"SGLANG_FORCE_FUSED_OP_BACKEND": "torch"}, plugins=("sync_check",))


@pytest.mark.gpu
@pytest.mark.rehearsed
@pytest.mark.group("kept-noise")
@pytest.mark.parametrize("shape", ["chains", "trees"], indirect=True)
def test_kept_noise(shape, engines: Engines, prompts):
    """Sampled answers are a function of prompt, parameters and seed: alone, with others, and in other orders."""
    config = kept_noise(shape)

    def call(chosen: list[int], **more) -> dict:
        asked = greedy([prompts[i] for i in chosen], NEW_TOKENS, flush=True, **more)
        asked["sampling_params"] = [
            params | DRAWN[i % len(DRAWN)] | {"sampling_seed": 2**40 + i}
            for i, params in zip(chosen, asked["sampling_params"])
        ]
        return asked

    alone = [call([i]) for i in range(4)]
    together = call(list(range(16)))
    backwards = call(list(reversed(range(16))))
    mixed = call(list(range(12)))
    # Greedy requests, and requests of SGLang's sampler.
    mixed["input_ids"] += prompts[20:24]
    mixed["sampling_params"] += [
        {"temperature": 0, "max_new_tokens": 30},
        {"temperature": 0, "presence_penalty": 0.5},
    ] * 2
    with engines.checking(config, "sync_check") as cycles:
        *by_itself, first, second = engines.ask(config, [*alone, together, backwards])
    [third] = engines.ask(config, [mixed])

    apart = {
        "alone": [first_difference(want, got) for [want], got in zip(by_itself, first)],
        "backwards": [first_difference(want, got) for want, got in zip(first, second[::-1])],
        "with others": [first_difference(want, got) for want, got in zip(first[:12], third)],
    }
    num_replayed = sum(cycle["replayed"] for cycle in cycles)
    print(f"\n{shape}: apart {apart}, {tokens_per_cycle(first):.2f} tokens per cycle, {num_replayed} replays")
    assert num_replayed == len(cycles) > 0
    assert all(index is None for indices in apart.values() for index in indices)
    assert len({tuple(answer["output_ids"]) for answer in first}) == 16
    assert tokens_per_cycle(first) > 1.2


@pytest.mark.gpu
@pytest.mark.rehearsed
@pytest.mark.group("kept-noise")
def test_kept_noise_of_chains_and_trees(engines, prompts):
    """A seed gives the same text, whatever is drafted."""
    texts = {}
    for shape in ("trees", "chains"):
        asked = greedy(prompts[:8], NEW_TOKENS, flush=True)
        for i, params in enumerate(asked["sampling_params"]):
            params |= DRAWN[i % len(DRAWN)] | {"sampling_seed": 2**41 + i}
        [answers] = engines.ask(kept_noise(shape), [asked])
        texts[shape] = [answer["output_ids"] for answer in answers]
    assert texts["trees"] == texts["chains"]
