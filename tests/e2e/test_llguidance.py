"""Structured output by llguidance, an alternative to SGLang's default grammar backend, xgrammar."""

import pytest
from grammars import GRAMMARS, assert_valid
from serving import LLGUIDANCE, assert_same_answers

pytest.importorskip("llguidance")
pytestmark = pytest.mark.parametrize("settings", [LLGUIDANCE], indirect=True, ids=str)


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars(pair, prompts, name):
    requests = [{"input_ids": prompt, "max_new_tokens": 120} | GRAMMARS[name] for prompt in prompts[:4]]

    answers = pair.lossless(lambda server: server.generate_concurrently(requests))

    assert_valid(name, answers)
    # Drafts were accepted under the grammar.
    verified = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert verified < sum(len(answer["output_ids"]) for answer in answers) - len(answers)


def test_everything_in_one_batch(pair, prompts):
    """Greedy requests have a grammar or none, and sampled requests in the same batch do not change them."""
    greedy = [*GRAMMARS.values(), {}, {"repetition_penalty": 1.2}]
    sampled = [{"temperature": 0.8} | options for options in (*[GRAMMARS["regex"]] * 3, {})]
    requests = [
        {"input_ids": prompt, "max_new_tokens": 120} | options for prompt, options in zip(prompts, greedy + sampled)
    ]

    dflash, plain = pair.ask(lambda server: server.generate_concurrently(requests))

    assert_same_answers(dflash[: len(greedy)], plain[: len(greedy)])
    assert_valid("regex", [dflash[0], *dflash[len(greedy) : -1]])
