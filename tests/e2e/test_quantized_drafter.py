"""A drafter whose weights are quantised as they are loaded: the text is the target's, and every cycle is the oracle's,
which has the same weights unquantised."""

from __future__ import annotations

import pytest
import torch
from checkpoints import CONFIG, tensors, write
from oracle import Oracle, assert_same_cycles
from serving import DEFAULT, Settings, trees

from models.tiny import DRAFTER_DIR

FLAG = ("speculative-draft-model-quantization", "fp8")
CHAINS = Settings("drafter-fp8", dflash_flags=(FLAG,), plain=DEFAULT)
TREES = Settings("drafter-fp8-trees", dflash_flags=(FLAG, *trees(8)), plain=DEFAULT)
pytestmark = [
    pytest.mark.parametrize("settings", [CHAINS, TREES], indirect=True, ids=str),
    pytest.mark.cpu(reason="a GPU quantises inputs too, and has no float32 there; see tests/gpu"),
]


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    """Return a checkpoint in float32 whose linear layers have weights that float8 can express, except for `fc`."""
    weights = {name: tensor.float() for name, tensor in tensors().items()}
    for name, weight in weights.items():
        if "proj" in name:
            scales = weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
            weights[name] = (weight / scales).to(torch.float8_e4m3fn).float() * scales
    return write(tmp_path_factory.mktemp("drafter") / "rounded", CONFIG, weights)


def test_cycles(pair, prompts, mixed_prompts, rounded, oracle):
    some = [*prompts[:6], mixed_prompts[-1]]

    answers = pair.lossless(lambda server: server.generate(some, max_new_tokens=64, ignore_eos=True))

    quantized = Oracle(rounded)
    options = {"ignore_eos": True} | pair.dflash.settings.cycles
    for prompt, answer in zip(some, answers):
        assert_same_cycles(answer, quantized.generate(prompt, 64, **options))
    served = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    unquantized = sum(len(oracle.generate(prompt, 64, **options).accept_lengths) for prompt in some)
    assert served < 1.1 * unquantized


def test_drafter_is_not_updated(pair, prompts):
    response = pair.dflash.try_post("/update_weights_from_disk", {"model_path": str(DRAFTER_DIR)})

    assert response.status_code == 400
    assert "--speculative-draft-model-quantization fp8" in response.text
    pair.lossless(lambda server: server.generate(prompts[7], max_new_tokens=24))
