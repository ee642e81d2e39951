"""`--enable-mixed-chunk`: decoding requests join a batch of prefills, with the one token that has no KV yet."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import REQUESTS, SYNC, Settings, trees
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from test_requests import numbers_of
from various import various_requests

MIXED = (("enable-mixed-chunk", True), ("chunked-prefill-size", 64))
DISALLOWED = {
    "custom_logit_processor": DisallowedTokensLogitsProcessor.to_str(),
    "custom_params": {"token_ids": [200, 263]},
}
LAST_STATES = ("return-hidden-states-mode", "last")
SETTINGS = [
    Settings("mixed", flags=(*MIXED, ("enable-custom-logit-processor", True), LAST_STATES), plain=REQUESTS),
    Settings(
        "mixed-page16-sync",
        flags=(
            *MIXED,
            ("page-size", 16),
            SYNC,
            ("enable-custom-logit-processor", True),
            LAST_STATES,
        ),
        plain=REQUESTS,
    ),
    Settings(
        "mixed-trees",
        flags=(*MIXED, ("enable-custom-logit-processor", True), LAST_STATES),
        dflash_flags=trees(8),
        plain=REQUESTS,
    ),
]

pytestmark = pytest.mark.parametrize("settings", SETTINGS, indirect=True, ids=str)


def num_mixed_steps(answers: list[dict]) -> int:
    """Return at least the output tokens that come neither from a prefill nor from a verified block."""
    histograms = [answer["meta_info"].get("spec_correct_drafts_histogram", []) for answer in answers]
    verified = [sum((drafts + 1) * count for drafts, count in enumerate(histogram)) for histogram in histograms]
    return sum(max(0, len(answer["output_ids"]) - 1 - tokens) for answer, tokens in zip(answers, verified))


def test_lossless(pair, mixed_prompts):
    requests = [
        {"input_ids": prompt, "max_new_tokens": 40 + 10 * (i % 5), "ignore_eos": True}
        for i, prompt in enumerate(mixed_prompts)
    ]

    answers = pair.lossless(lambda server: server.generate_concurrently(requests))

    assert num_mixed_steps(answers) > len(requests)


def test_requests_of_every_kind(pair, mixed_prompts):
    """Processors and penalties see a request's whole output, with the tokens of mixed steps."""
    requests = various_requests([*mixed_prompts, *mixed_prompts])
    for request in requests[0::8]:
        request |= {"min_new_tokens": 15, "stop_token_ids": [200, 13], "ignore_eos": False}
    for request in requests[4::8]:
        request |= DISALLOWED
    # Requests for log probabilities are never mixed, and prevent it for their batch.
    requests = [request for request in requests if "return_logprob" not in request]

    answers = pair.lossless(lambda server: server.generate_concurrently(requests))

    assert num_mixed_steps(answers) > 0


def test_last_hidden_states(pair, mixed_prompts):
    """Prompts are in chunks, several in a batch, and some requests end with the first token."""
    bodies = [
        {"model": "tiny", "prompt": [10 + i, *prompt], "temperature": 0, "max_tokens": 1 + 4 * (i % 3)}
        | {"return_hidden_states": "last"}
        for i, prompt in enumerate(mixed_prompts[:9])
    ]

    def ask(server):
        with ThreadPoolExecutor(len(bodies)) as threads:
            return list(threads.map(lambda body: server.post("/v1/completions", body)["choices"][0], bodies))

    for mine, expected in zip(*pair.ask(ask)):
        assert mine["text"] == expected["text"]
        numbers = numbers_of(expected["hidden_states"])
        assert len(numbers) == 256
        assert numbers_of(mine["hidden_states"]) == pytest.approx(numbers, abs=1e-3)
