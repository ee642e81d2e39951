"""`SGLANG_SIMULATE_ACC_LEN` forces the acceptance length for any drafts."""

import pytest
from serving import Settings, trees

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
