"""Requests of every kind with trees: those that need SGLang's sampler verify chains."""

import pytest
from grammars import GRAMMARS
from serving import REQUESTS_TREES, assert_same_answers
from test_requests import ADJUSTED, numbers_of

pytestmark = pytest.mark.parametrize("settings", [REQUESTS_TREES], indirect=True, ids=str)


def test_everything_in_one_batch(pair, prompts):
    """Half of the requests verify trees."""
    fallback = [*ADJUSTED.values(), *GRAMMARS.values(), {"return_logprob": True}]
    requests = [
        {"input_ids": prompts[i], "max_new_tokens": 70, "ignore_eos": i % 2 == 0}
        | (fallback[i // 2] | {"ignore_eos": False} if i % 2 else {})
        for i in range(2 * len(fallback))
    ]

    pair.lossless(lambda server: server.generate_concurrently(requests))

    assert pair.dflash.log().count("are verified in chains, not in trees") == 1


def test_hidden_states(pair, prompts):
    """Hidden states are those of the accepted paths' tokens, at any node, and of chains."""
    requests = [
        {"input_ids": [10 + i, *prompt], "max_new_tokens": 30, "ignore_eos": True, "return_hidden_states": i != 1}
        | ({"presence_penalty": 0.3} if i == 2 else {})
        for i, prompt in enumerate(prompts[:4])
    ]

    dflash, plain = pair.ask(lambda server: server.generate_concurrently(requests))

    assert_same_answers(dflash, plain)
    assert "hidden_states" not in dflash[1]["meta_info"]
    for i in (0, 2, 3):
        numbers = numbers_of(plain[i]["meta_info"]["hidden_states"])
        assert len(numbers) > 30 * 64
        assert numbers_of(dflash[i]["meta_info"]["hidden_states"]) == pytest.approx(numbers, abs=1e-3)
