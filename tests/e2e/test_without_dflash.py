"""Servers without DFLASH are SGLang's own; their start checks that `/server_info` says so."""

import pytest
from serving import DEFAULT, Settings


@pytest.mark.parametrize("settings", [DEFAULT], indirect=True, ids=str)
def test_server_without_speculation(pair, prompts, oracle):
    answer = pair.plain.generate(prompts[0], max_new_tokens=40)

    assert "DFLASH is served by sglang-dflash" in pair.dflash.log()
    assert "DFLASH is served by sglang-dflash" not in pair.plain.log()
    assert answer["output_ids"] == oracle.generate(prompts[0], 40).tokens
    assert not [key for key in answer["meta_info"] if key.startswith("spec_")]


@pytest.mark.parametrize("settings", [DEFAULT], indirect=True, ids=str)
def test_scores(pair, prompts):
    """Without speculation, SGLang computes these without a decode step."""
    body = {"model": "m", "query": "def f(", "items": ["x", "y)"], "label_token_ids": [5, 6, 7]}
    expected, answer = (server.post("/v1/score", body)["scores"] for server in (pair.plain, pair.dflash))

    assert len(expected) == 2
    assert [pytest.approx(scores, abs=1e-5) for scores in expected] == answer
    # Nothing was lost meanwhile.
    assert pair.plain.generate(prompts[0], max_new_tokens=2)["output_ids"]


def test_server_without_the_plugin(keeper, prompts, oracle):
    """The modules that SGLang needs on a CPU to be imported do not depend on its plugins."""
    server = keeper.server(Settings("no-plugins", env=(("SGLANG_PLUGINS", "none"),)), dflash=False)

    answer = server.generate(prompts[0], max_new_tokens=40)

    assert answer["output_ids"] == oracle.generate(prompts[0], 40).tokens
