"""The hybrid pair, a trained drafter for a target with recurrent layers, accepts as the batch-1 algorithm does."""

import pytest
from oracle import Oracle, assert_same_cycles
from serving import Settings
from transformers import AutoTokenizer

from models.hybrid import DRAFTER_DIR, TARGET_DIR
from models.tiny import load_prompts

NEW_TOKENS = 64


def hybrid_pair(name: str, *dflash_flags: tuple, plain: Settings | None = None) -> Settings:
    return Settings(
        name,
        flags=(("model-path", str(TARGET_DIR)), ("max-mamba-cache-size", 100)),
        dflash_flags=(("speculative-draft-model-path", str(DRAFTER_DIR)), *dflash_flags),
        env=(("SGLANG_MAMBA_CONV_DTYPE", "float32"),),
        plain=plain,
    )


CHAINS = hybrid_pair("hybrid-pair")


def trees(num_nodes: int) -> Settings:
    flags = (("speculative-eagle-topk", 8), ("speculative-num-draft-tokens", num_nodes))
    return hybrid_pair(f"hybrid-trees-{num_nodes}", *flags, plain=CHAINS)


TREES = (trees(16), trees(24))

pytestmark = [
    pytest.mark.cpu(reason="SGLang's kernels for prompts of recurrent layers take no float32; see tests/gpu"),
    pytest.mark.parametrize("settings", [CHAINS, *TREES], indirect=True, ids=str),
]


def test_lossless_in_the_oracles_cycles(pair, settings):
    tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR)
    prompts = tokenizer(load_prompts()[::6]).input_ids
    oracle = Oracle(DRAFTER_DIR, TARGET_DIR)

    answers = pair.lossless(lambda server: server.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True))

    for prompt, answer in zip(prompts[:4], answers):
        expected = oracle.generate(prompt, NEW_TOKENS, ignore_eos=True, **settings.cycles)
        assert_same_cycles(answer, expected)
    cycles = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    most = 0.6 if settings == CHAINS else 0.4
    assert cycles < most * NEW_TOKENS * len(prompts), "hardly a draft was accepted"
