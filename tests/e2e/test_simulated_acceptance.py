"""Simulations replace what is accepted: `SGLANG_SIMULATE_ACC_LEN` by a length, recorded drafts by those of a pair."""

import pytest
from serving import Settings, trees
from support.recorded import ANSWER, CANDIDATES, record

SIMULATED = (("SGLANG_SIMULATE_ACC_LEN", "4"),)


@pytest.mark.parametrize(
    "settings",
    [Settings("simulated", env=SIMULATED), Settings("simulated-trees", dflash_flags=trees(4, 8), env=SIMULATED)],
    indirect=True,
    ids=str,
)
def test_every_cycle_accepts_the_simulated_length(keeper, settings, prompts):
    server = keeper.server(settings, dflash=True)

    # SGLang updates acceptance every 40 cycles.
    answers = server.generate(prompts[:4], max_new_tokens=201, ignore_eos=True)

    for answer in answers:
        assert len(answer["output_ids"]) == 201
        # The first token is the prefill's; 50 cycles of 4 give the others.
        assert answer["meta_info"]["spec_correct_drafts_histogram"] == [0, 0, 0, 50]
    assert server.internal_state()["avg_spec_accept_length"] == pytest.approx(4, abs=0.1)


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> str:
    return record(tmp_path_factory.mktemp("recorded") / "drafts.safetensors")


@pytest.mark.parametrize(
    ("flags", "tokens_per_cycle"),
    [
        ((), 1),
        # All paths of three of the two best candidates have 14 nodes.
        (trees(CANDIDATES, 16), 4),
    ],
    ids=["chains", "trees"],
)
def test_recorded_drafts(keeper, records, prompts, flags, tokens_per_cycle):
    settings = Settings(
        f"recorded-{tokens_per_cycle}", dflash_flags=flags, env=(("SGLANG_DFLASH_RECORDED_DRAFTS", records),)
    )
    asked = sorted(prompts, key=len)[:3]
    new_tokens = 1 + 20 * tokens_per_cycle

    answers = keeper.server(settings, dflash=True).generate(asked, max_new_tokens=new_tokens, ignore_eos=True)

    for prompt, answer in zip(asked, answers):
        # After the prefill's token, the recorded answer's at the same positions.
        begin = len(prompt) + 1
        assert answer["output_ids"][1:] == ANSWER[begin : begin + new_tokens - 1]
        assert answer["meta_info"]["spec_verify_ct"] == 20
