"""Quantised targets on a GPU: lossless up to ties of the quantised target, with nearly the same acceptance."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from engines import tiny
from pairs import CPU_TOKENS_PER_CYCLE, check_texts, flat, pair_calls
from safetensors.torch import load_file, save_file

from models.tiny import TARGET_DIR

# If bf16's rounding moves an activation across a boundary of fp8, the step is up to an eighth. So two logits may change
# places over twice the distance that bf16 alone allows (0.25).
TIE = 0.5
# Usual numbers of identical texts, of 60. A tree's attention rounds otherwise than that of decoding, and fp8 enlarges
# that in every layer.
USUAL = {
    ("weights", "chains"): 53,
    ("weights", "trees"): 22,
    ("lm_head", "trees"): 36,
}


def write_target_with_fp8_head(path: Path) -> None:
    """Write the tiny pair's target as ModelOpt would export it with only the lm_head in fp8."""
    shutil.copytree(TARGET_DIR, path)
    config = json.loads((path / "config.json").read_text())
    config["tie_word_embeddings"] = False
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["model.*"]}
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(TARGET_DIR / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].float()
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = head.abs().max() / largest
    # No output of a norm exceeds the root of its size, times the weight.
    largest_input = tensors["model.norm.weight"].float().abs().max() * config["hidden_size"] ** 0.5
    tensors |= {
        "lm_head.weight": (head / scale).to(torch.float8_e4m3fn),
        "lm_head.weight_scale": scale,
        "lm_head.input_scale": largest_input / largest,
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> dict:
    """Return arguments of Engines by what is quantised."""
    path = tmp_path_factory.mktemp("quantized") / "target"
    write_target_with_fp8_head(path)
    return {"weights": {"quantization": "fp8"}, "lm_head": {"model_path": str(path)}}


@pytest.mark.gpu
@pytest.mark.group("quantized-{quantized}")
@pytest.mark.parametrize(("quantized", "shape"), USUAL)
def test_lossless_up_to_ties(quantized, shape, engines, target, prompts):
    reference = tiny(f"quantized-{quantized}-plain", **target[quantized])
    of_plain = flat(engines.reference(reference, pair_calls(prompts)))
    config = tiny(f"quantized-{quantized}-{shape}", shape, **target[quantized])
    compared, rate = check_texts(engines, config, of_plain, pair_calls(prompts))

    compared.assert_ties(TIE)
    compared.assert_floor(USUAL[quantized, shape])
    assert rate > 0.8 * CPU_TOKENS_PER_CYCLE[shape]
