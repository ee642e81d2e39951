"""A trained DFlash2 drafter: the text is the target's, and cycles commit as many tokens as the oracle's."""

import pytest
from oracle import Oracle, assert_same_cycles
from serving import DEFAULT, TREES_ON_A_GPU, Settings, trees

from models.tiny_dflash2 import DRAFTER_DIR

NEW_TOKENS = 64
DRAFTER = ("speculative-draft-model-path", str(DRAFTER_DIR))
CHAINS = Settings("dflash2", dflash_flags=(DRAFTER,), plain=DEFAULT, trained=8)
TREES = Settings("dflash2-trees", dflash_flags=(DRAFTER, *trees(16, 16)), plain=DEFAULT, trained=8)


@pytest.mark.parametrize(
    ("settings", "least"),
    [(CHAINS, 2.4), pytest.param(TREES, 2.9, marks=pytest.mark.cpu(reason=TREES_ON_A_GPU))],
    indirect=["settings"],
    ids=str,
)
def test_lossless_in_the_oracles_cycles(pair, settings, least, prompts):
    answers = pair.lossless(lambda server: server.generate(prompts[:8], max_new_tokens=NEW_TOKENS, ignore_eos=True))

    oracle = Oracle(DRAFTER_DIR)
    for prompt, answer in zip(prompts[:4], answers):
        assert_same_cycles(answer, oracle.generate(prompt, NEW_TOKENS, ignore_eos=True, **settings.cycles))
    cycles = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert len(answers) * (NEW_TOKENS - 1) / cycles > least
