"""Quantised targets on a GPU: lossless up to ties of the quantised target, with nearly the same acceptance."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine_process import run
from support.ties import first_difference
from transformers import AutoTokenizer

from models.tiny import DRAFTER_DIR, TARGET_DIR, load_prompts

NEW_TOKENS = 128
ENGINE = {
    "dtype": "bfloat16",
    "max_total_tokens": 20_000,
    "mem_fraction_static": 0.98,
    "max_running_requests": 16,
    "cuda_graph_bs_decode": [1, 4, 16],
    "disable_prefill_cuda_graph": True,
}
DFLASH = {
    "speculative_algorithm": "DFLASH",
    "speculative_draft_model_path": str(DRAFTER_DIR),
    "speculative_eagle_topk": 1,
}
# If bf16's rounding moves an activation across a boundary of fp8, the step is up to an eighth. So two logits may change
# places over twice the distance that bf16 alone allows (0.25).
TIE = 0.5


def write_target_with_fp8_head(path):
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


@pytest.mark.gpu
@pytest.mark.parametrize("quantized", ["weights", "lm_head"])
def test_lossless_up_to_ties(quantized, tmp_path):
    engine = ENGINE | {"model_path": str(TARGET_DIR), "quantization": "fp8"}
    if quantized == "lm_head":
        write_target_with_fp8_head(tmp_path / "target")
        engine = ENGINE | {"model_path": str(tmp_path / "target")}
    tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR)
    call = {
        "input_ids": [tokenizer(prompt)["input_ids"] for prompt in load_prompts()],
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
    }

    [plain], _ = run(tmp_path, engine, [call | {"return_logprob": True, "top_logprobs_num": 2}])
    [dflash], described = run(tmp_path, engine | DFLASH, [call])

    assert described["worker"] == "DFlashWorker"
    same, widest = 0, 0.0
    for want, got in zip(plain, dflash):
        differs = first_difference(want, got)
        if differs is not None:
            best, second = (entry[0] for entry in want["meta_info"]["output_top_logprobs"][differs])
            widest = max(widest, best - second)
        else:
            assert len(got["output_ids"]) == NEW_TOKENS
            same += 1
    cycles = sum(answer["meta_info"]["spec_verify_ct"] for answer in dflash)
    tokens_per_cycle = len(dflash) * (NEW_TOKENS - 1) / cycles
    identical = f"{same} of {len(plain)} identical, ties up to {widest:.3f}"
    print(f"\n{quantized} in fp8: {identical}, {tokens_per_cycle:.3f} tokens per cycle")
    assert widest <= TIE
    # The unquantised target has 4.33.
    assert tokens_per_cycle > 3.5
    assert same > len(plain) / 5
