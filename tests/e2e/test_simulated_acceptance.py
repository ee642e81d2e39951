"""Simulations replace what is accepted: `SGLANG_SIMULATE_ACC_LEN` by a length, recorded drafts by those of a pair."""

import pytest
import torch
from safetensors.torch import save_file
from serving import Settings, trees

SIMULATED = (("SGLANG_SIMULATE_ACC_LEN", "4"),)
# Tokens with drafts, drafts per token, candidates per draft.
LENGTH, DEPTHS, CANDIDATES = 240, 15, 16


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


def recorded(file) -> str:
    """Write drafts of one answer, in which the right token is always the second candidate."""
    answer = 5 + torch.arange(LENGTH + DEPTHS + 1)
    right = answer[1:].unfold(0, DEPTHS, 1)[:LENGTH]
    # Wrong tokens are in no answer.
    candidates = (300 + torch.arange(CANDIDATES)).expand(LENGTH, DEPTHS, CANDIDATES).clone()
    candidates[..., 1] = right
    # Log probabilities of -11/16, -12/16, and very small ones.
    sixteenths = torch.tensor([11, 12] + [200] * (CANDIDATES - 2)).expand_as(candidates)
    records = {
        "answers": answer[None].int(),
        "num_tokens": torch.tensor([LENGTH]),
        "candidates": candidates[None].to(torch.uint16),
        "sixteenths": sixteenths[None].to(torch.uint8).contiguous(),
    }
    save_file(records, file)
    return str(file)


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> str:
    return recorded(tmp_path_factory.mktemp("recorded") / "drafts.safetensors")


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
        assert answer["output_ids"][1:] == list(range(5 + begin, 5 + begin + new_tokens - 1))
        assert answer["meta_info"]["spec_verify_ct"] == 20
