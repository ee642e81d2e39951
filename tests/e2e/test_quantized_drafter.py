"""A drafter with float8 weights, a checkpoint's or made when they are loaded: the text is the target's, and every cycle
is the oracle's, which has the same weights unquantised."""

from __future__ import annotations

import pytest
import torch
from checkpoints import CONFIG, QUANTIZED, tensors, write
from oracle import Oracle, assert_same_cycles
from serving import DEFAULT, Settings, trees

from models.tiny import DRAFTER_DIR

FLAG = ("speculative-draft-model-quantization", "fp8")
TREES = Settings("drafter-fp8-trees", dflash_flags=(FLAG, *trees(8)), plain=DEFAULT)
pytestmark = pytest.mark.cpu(reason="a GPU quantises inputs too, and has no float32 there; see tests/gpu")
# Servers with checkpoints verify chains.
made_when_loaded = pytest.mark.parametrize("settings", [TREES], indirect=True, ids=str)


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    """Return a checkpoint in float32 whose linear layers have weights that float8 can express, except for `fc`."""
    weights = {name: tensor.float() for name, tensor in tensors().items()}
    for name, weight in weights.items():
        if "proj" in name:
            scales = weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
            weights[name] = (weight / scales).to(torch.float8_e4m3fn).float() * scales
    return write(tmp_path_factory.mktemp("drafter") / "rounded", CONFIG, weights)


@made_when_loaded
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


@made_when_loaded
def test_drafter_is_not_updated(pair, prompts):
    response = pair.dflash.try_post("/update_weights_from_disk", {"model_path": str(DRAFTER_DIR)})

    assert response.status_code == 400
    assert "--speculative-draft-model-quantization fp8" in response.text
    pair.lossless(lambda server: server.generate(prompts[7], max_new_tokens=24))


@pytest.mark.parametrize("writers", QUANTIZED, ids=lambda writers: "-".join(write.__name__ for write in writers))
def test_checkpoints(writers, keeper, prompts, mixed_prompts, tmp_path):
    paths = [write(tmp_path / write.__name__) for write in writers]
    oracles = [Oracle(rounded) for _, rounded in paths]
    settings = [
        Settings(
            quantized.name,
            dflash_flags=(("speculative-draft-model-path", str(quantized)),),
            trained=oracle.block_size,
        )
        for (quantized, _), oracle in zip(paths, oracles)
    ]
    some = [*prompts[:6], mixed_prompts[0], mixed_prompts[-1]]

    for server, oracle in zip(keeper.together(*settings), oracles):
        answers = server.generate(some, max_new_tokens=64)

        for prompt, answer in zip(some, answers):
            assert_same_cycles(answer, oracle.generate(prompt, 64, **server.settings.cycles))
        response = server.try_post("/update_weights_from_disk", {"model_path": str(DRAFTER_DIR)})
        assert response.status_code == 400 and "float8 weights" in response.text
