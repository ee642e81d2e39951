"""The hybrid pair, a trained drafter for a target with recurrent layers, accepts as the batch-1 algorithm does."""

import pytest
from oracle import Oracle, assert_same_cycles
from serving import Settings
from transformers import AutoTokenizer

from models.hybrid import DRAFTER_DIR, TARGET_DIR
from models.tiny import load_prompts

HYBRID_PAIR = Settings(
    "hybrid-pair",
    flags=(("model-path", str(TARGET_DIR)), ("max-mamba-cache-size", 100)),
    dflash_flags=(("speculative-draft-model-path", str(DRAFTER_DIR)),),
    env=(("SGLANG_MAMBA_CONV_DTYPE", "float32"),),
)
NEW_TOKENS = 64

pytestmark = [
    pytest.mark.cpu(reason="SGLang's kernels for prompts of recurrent layers take no float32; see tests/gpu"),
    pytest.mark.parametrize("settings", [HYBRID_PAIR], indirect=True, ids=str),
]


def test_lossless_in_the_oracles_cycles(pair):
    tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR)
    prompts = tokenizer(load_prompts()[::6]).input_ids
    oracle = Oracle(DRAFTER_DIR, TARGET_DIR)

    answers = pair.lossless(lambda server: server.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True))

    for prompt, answer in zip(prompts[:4], answers):
        assert_same_cycles(answer, oracle.generate(prompt, NEW_TOKENS, ignore_eos=True))
    cycles = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert cycles < 0.6 * NEW_TOKENS * len(prompts), "hardly a draft was accepted"
