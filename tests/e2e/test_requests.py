"""Requested outputs besides tokens, and options that change tokens: the answers equal those without speculation."""

import math

import pytest
from grammars import GRAMMARS, assert_valid
from oracle import EOS
from serving import REQUESTS, REQUESTS_SYNC, assert_same_answers
from sglang.srt.sampling.custom_logit_processor import (
    DeepseekOCRNoRepeatNGramLogitProcessor,
    DisallowedTokensLogitsProcessor,
)

pytestmark = pytest.mark.parametrize("settings", [REQUESTS, REQUESTS_SYNC], indirect=True, ids=str)

NEWLINE = 200

ADJUSTED = {
    "frequency_penalty": {"frequency_penalty": 0.7},
    "negative frequency_penalty": {"frequency_penalty": -0.2},
    "presence_penalty": {"presence_penalty": 0.9},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "frequency and presence": {"frequency_penalty": 0.4, "presence_penalty": 0.3},
    "min_new_tokens": {"min_new_tokens": 40, "stop_token_ids": [NEWLINE, 13], "ignore_eos": False},
    "logit_bias": {"logit_bias": {"263": 4.0, str(NEWLINE): -100}},
    "penalty and bias": {"presence_penalty": 0.5, "logit_bias": {"263": 2.0}, "min_new_tokens": 10},
    "no repeated 3-gram": {
        "custom_logit_processor": DeepseekOCRNoRepeatNGramLogitProcessor.to_str(),
        "custom_params": {"ngram_size": 3, "window_size": 100},
    },
    "disallowed tokens": {
        "custom_logit_processor": DisallowedTokensLogitsProcessor.to_str(),
        "custom_params": {"token_ids": [NEWLINE, 263]},
    },
}


def generate(prompts, **options):
    options = {"max_new_tokens": 60, "ignore_eos": True} | options
    return lambda server: server.generate_concurrently([{"input_ids": prompt} | options for prompt in prompts])


@pytest.mark.parametrize("name", ADJUSTED)
def test_adjusted_logits(pair, prompts, name):
    unadjusted = pair.plain.generate(prompts[:3], max_new_tokens=60, ignore_eos=True)

    answers = pair.lossless(generate(prompts[:3], **ADJUSTED[name]))

    assert any(answer["output_ids"] != other["output_ids"] for answer, other in zip(answers, unadjusted))
    assert sum(answer["meta_info"]["spec_verify_ct"] for answer in answers) < 3 * 59


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars(pair, prompts, name):
    # Without speculation, SGLang lets a request that ignores its end write one token past its grammar.
    answers = pair.lossless(generate(prompts[:4], **GRAMMARS[name], ignore_eos=False, max_new_tokens=120))

    assert_valid(name, answers)


def test_answers_that_ignore_their_end_end_with_their_grammar(pair, prompts):
    """Without speculation SGLang notices the end of a grammar one token late; that token is not part of the answer."""
    dflash, plain = pair.ask(generate(prompts[:4], **GRAMMARS["regex"], max_new_tokens=120))

    ended = 0
    for mine, expected in zip(dflash, plain):
        if expected["meta_info"]["finish_reason"]["type"] == "length":
            assert_same_answers(mine, expected)
            continue
        ended += 1
        assert mine["output_ids"] == expected["output_ids"][:-1]
        assert mine["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert ended
    assert_valid("regex", dflash)


def test_everything_in_one_batch(pair, prompts):
    requests = [
        {"input_ids": prompts[i], "max_new_tokens": 70} | params
        for i, params in enumerate([*ADJUSTED.values(), *GRAMMARS.values(), {}, {"return_logprob": True}])
    ]

    pair.lossless(lambda server: server.generate_concurrently(requests))


def numbers_of(tree):
    """Return the finite numbers of nested lists and objects in order, without token texts."""
    if isinstance(tree, dict):
        tree = [tree[key] for key in sorted(tree)]
    if isinstance(tree, list):
        return [number for value in tree for number in numbers_of(value)]
    return [float(tree)] if isinstance(tree, (int, float)) and math.isfinite(tree) else []


def test_log_probabilities(pair, prompts):
    options = {
        "return_logprob": True,
        "top_logprobs_num": 4,
        "token_ids_logprob": [5, NEWLINE],
        "logprob_start_len": 3,
        "frequency_penalty": 0.3,
    }

    dflash, plain = pair.ask(generate(prompts[:4], **options))

    assert_same_answers(dflash, plain)
    for mine, expected in zip(dflash, plain):
        fields = [name for name in expected["meta_info"] if name.endswith(("_logprobs", "_logprob"))]
        assert len(fields) >= 6
        for field in fields:
            numbers = numbers_of(expected["meta_info"][field])
            assert len(numbers) > 4
            assert numbers_of(mine["meta_info"][field]) == pytest.approx(numbers, abs=1e-4)
        assert len(mine["meta_info"]["output_token_logprobs"]) == len(mine["output_ids"])


def test_log_probabilities_of_some(pair, prompts):
    """Some requests of a batch ask for log probabilities, each for different ones."""
    requests = [
        {"input_ids": prompt, "max_new_tokens": 40} | options
        for prompt, options in zip(
            prompts[:3], [{}, {"return_logprob": True, "top_logprobs_num": 2}, {"return_logprob": True}]
        )
    ]

    dflash, plain = pair.ask(lambda server: server.generate_concurrently(requests))

    assert_same_answers(dflash, plain)
    assert "output_token_logprobs" not in dflash[0]["meta_info"]
    for mine, expected in zip(dflash[1:], plain[1:]):
        for field in ("output_token_logprobs", "output_top_logprobs"):
            if field in expected["meta_info"]:
                assert numbers_of(mine["meta_info"][field]) == pytest.approx(
                    numbers_of(expected["meta_info"][field]), abs=1e-4
                )


def test_openai_log_probabilities(pair):
    completion = {"model": "tiny", "prompt": "def f(x):\n", "temperature": 0, "max_tokens": 30, "logprobs": 3}
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "def f(x):\n"}],
        "temperature": 0,
        "max_tokens": 30,
        "logprobs": True,
        "top_logprobs": 2,
    }
    for path, body in (("/v1/completions", completion | {"echo": True}), ("/v1/chat/completions", chat)):
        dflash, plain = pair.ask(lambda server, path=path, body=body: server.post(path, body)["choices"][0])

        numbers = numbers_of(plain["logprobs"])
        assert len(numbers) > 30
        assert numbers_of(dflash["logprobs"]) == pytest.approx(numbers, abs=1e-4)
        assert dflash["finish_reason"] == plain["finish_reason"]


def test_hidden_states(pair, prompts):
    # Prompts without a common prefix, because tokens in the radix cache have no hidden states.
    requests = [
        {"input_ids": [10 + i, *prompt], "max_new_tokens": 30, "ignore_eos": True, "return_hidden_states": i != 1}
        for i, prompt in enumerate(prompts[:3])
    ]

    dflash, plain = pair.ask(lambda server: server.generate_concurrently(requests))

    assert_same_answers(dflash, plain)
    assert "hidden_states" not in dflash[1]["meta_info"]
    for mine, expected in ((dflash[0], plain[0]), (dflash[2], plain[2])):
        numbers = numbers_of(expected["meta_info"]["hidden_states"])
        assert len(numbers) > 30 * 64
        assert numbers_of(mine["meta_info"]["hidden_states"]) == pytest.approx(numbers, abs=1e-3)
