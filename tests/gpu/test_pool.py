"""SGLang's own sizing of the KV pool, with the drafter's counted in: a full pool leaves the GPU memory to work with."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fill_pool.py")
HEAD_DIM, KV_HEADS, LAYERS, DRAFT_LAYERS = 128, 64, 16, 3
# KV heads as many as few targets have: over half a megabyte per token, so that the pool is soon full. The vocabulary is
# Qwen3's, whose logits are what verification needs most memory for.
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": KV_HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
ENGINE = {"dtype": "bfloat16", "load_format": "dummy", "disable_prefill_cuda_graph": True}
ENVIRONMENT = {
    # Drafts of dummy weights are all wrong.
    "SGLANG_SIMULATE_ACC_LEN": "8",
    # SGLang's own check of its pool, which ends an Engine that has lost a slot.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
}


def write_configs(folder: Path) -> dict:
    """Configs of a target and a drafter, whose weights are dummies; the Engine's arguments that name them."""
    target = SHAPE | {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": LAYERS}
    drafter = SHAPE | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": DRAFT_LAYERS,
        "num_target_layers": LAYERS,
        "block_size": 16,
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 7, 13]},
    }
    for name, config in (("target", target), ("drafter", drafter)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return {
        "model_path": str(folder / "target"),
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(folder / "drafter"),
    }


def free_memory() -> int:
    """MiB that no process on the GPU uses, without a CUDA context of our own."""
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])


@pytest.mark.gpu
def test_full_pool(tmp_path):
    output, log = tmp_path / "result.json", tmp_path / "log.txt"
    command = [sys.executable, SCRIPT, json.dumps(ENGINE | write_configs(tmp_path)), output]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=stderr)
    least_free = free_memory()
    try:
        while process.poll() is None:
            least_free = min(least_free, free_memory())
            time.sleep(0.1)
    finally:
        process.kill()
    assert process.returncode == 0, log.read_text()[-4000:]
    result = json.loads(output.read_text())
    described = result["described"]
    print(f"\n{described['kv_bytes_per_token']} bytes per token, room for {described['kv_capacity_tokens']} tokens")
    print(f"{result['num_retractions']} retractions, {least_free} MiB free at the fullest")

    per_layer = 2 * KV_HEADS * HEAD_DIM * 2
    assert described["kv_bytes_per_token"] == {"target": LAYERS * per_layer, "drafter": DRAFT_LAYERS * per_layer}
    # Requests are put back when the next block of one has no slots any more.
    assert result["num_retractions"] > 0
    assert all(reason["type"] == "length" for reason in result["finished"])
    assert result["output_lens"] == [result["new_tokens"]] * (result["running"] + result["running"] // 4)
    assert result["used_afterwards"] == 0
    assert least_free > 0
