"""SGLang's Triton attention, the kernels a GPU would run, through Triton's interpreter."""

import pytest
from oracle import assert_same_cycles
from serving import Settings

NEW_TOKENS = 10


def settings(target: str, drafter: str | None) -> Settings:
    return Settings(
        f"{target}-{drafter or 'same'}",
        flags=(("attention-backend", target),),
        dflash_flags=(("speculative-draft-attention-backend", drafter),) if drafter else (),
        env=(("TRITON_INTERPRET", "1"),),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "draft_backend"),
    [
        (settings("triton", None), "triton"),
        (settings("triton", "torch_native"), "torch_native"),
        (settings("torch_native", "triton"), "triton"),
    ],
    indirect=["settings"],
    ids=str,
)
def test_backends_of_target_and_drafter(pair, prompts, oracle, draft_backend):
    assert pair.dflash.internal_state()["sglang_dflash"]["draft_attention_backend"] == draft_backend
    some = [prompts[0][:20], prompts[1]]

    answers = pair.lossless(lambda server: server.generate(some, max_new_tokens=NEW_TOKENS, ignore_eos=True))

    for prompt, answer in zip(some, answers):
        assert_same_cycles(answer, oracle.generate(prompt, NEW_TOKENS, ignore_eos=True))
