"""SGLang's own sizing of the KV pool, with the drafter's and the cycles' memory counted in.

A full pool leaves enough GPU memory for requests of every kind.
"""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from support import processes

from models.tiny import TARGET_DIR

SCRIPT = Path(__file__).with_name("fill_pool.py")
RUNNING = 256
HEAD_DIM, KV_HEADS, LAYERS, DRAFT_LAYERS = 128, 64, 16, 3
# More KV heads than most targets: over half a megabyte per token, so that the pool is soon full. The vocabulary is
# Qwen3's, whose logits take most of verification's memory.
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
ENGINE = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "disable_prefill_cuda_graph": True,
    # Shorter drafts would leave slots free.
    "speculative_adaptive_config": "fixed",
    # Requests are admitted as if they would end early, so that the pool becomes full.
    "schedule_conservativeness": 0.3,
}
# SGLang's own check of its pool, which ends an Engine that has lost a slot.
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}


def write_configs(folder: Path) -> dict:
    """Write configs of a target and a drafter with dummy weights. Return the Engine's arguments that name them."""
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
    """Return the free MiB of the first visible GPU, without creating a CUDA context."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", "--id", device]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])


def fill(
    folder: Path, engine: dict, shares: tuple[float, float], rounds: list[list[dict]], environment: dict
) -> tuple[dict, list[int]]:
    """Return what `fill_pool.py` writes, and the least free memory in MiB in each of its rounds."""
    output, log = folder / "result.json", folder / "log.txt"
    arguments = (json.dumps(each) for each in (ENGINE | engine | write_configs(folder), shares, rounds))
    process = processes.start([str(SCRIPT), *arguments, str(output)], environment, folder / "stdout.txt", log)
    least_free = [free_memory() for _ in rounds]
    try:
        while process.is_running():
            ended = sum(Path(f"{output}.{number}").exists() for number in range(len(rounds)))
            current = min(ended, len(rounds) - 1)
            least_free[current] = min(least_free[current], free_memory())
            time.sleep(0.1)
        status = process.wait(0)
    finally:
        process.end()
    assert status == 0, log.read_text()[-4000:]
    return json.loads(output.read_text()), least_free


def assert_served(result: dict) -> None:
    for of_round in result["rounds"]:
        # Requests are retracted when there are no slots for the next block of one.
        assert of_round["num_retractions"] > 0
        assert all(reason["type"] == "length" for reason in of_round["finished"])
        assert of_round["output_lens"] == [result["new_tokens"]] * (result["running"] + result["running"] // 4)
    assert result["used_afterwards"] == 0


# With a tokenizer of the prompts' tokens, for grammars.
MANY = {
    "tokenizer_path": str(TARGET_DIR),
    "max_running_requests": RUNNING,
    "cuda_graph_bs_decode": [8, 64, RUNNING],
}
# Answers end at their length, with any tokens.
LONG = {"ignore_eos": True}
# Greedy answers of random weights repeat themselves, are copied, and end before the pool is full.
PLAIN = [LONG | {"temperature": 1.0}, LONG | {"temperature": 1.0, "top_p": 0.9}]
FALLBACK = [
    {"temperature": 0, "return_logprob": True},
    {"temperature": 1.0, "top_p": 0.9, "return_logprob": True},
    {"temperature": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0, "min_new_tokens": 8, "presence_penalty": 0.3},
    {"temperature": 0, "logit_bias": {"5": 1.0}},
    {"temperature": 0, "regex": "[a-z ]{2000,}"},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
]


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.group("pool")
@pytest.mark.parametrize("is_seeded", [False, True], ids=["unseeded", "seeded"])
def test_requests_of_every_kind(tmp_path, is_seeded):
    """256 requests that need SGLang's sampler take more memory than 256 that the graph samples.

    They take no more than the memory that was reserved for it when the pool was sized, and what SGLang itself keeps
    for penalties and biases. They are among requests with trees; seeds come with deterministic inference, which
    excludes trees.
    """
    deterministic = {"enable_deterministic_inference": True, "attention_backend": "fa3"}
    engine = MANY | (deterministic if is_seeded else {})
    seeds = [{"sampling_seed": i} if is_seeded else {} for i in range(len(FALLBACK))]
    fallback = [kind | LONG | seed for kind, seed in zip(FALLBACK, seeds, strict=True)]
    environment = STRICT | {
        # Free memory is then memory that is not needed: no cached block waits for a request of its size.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }

    rounds = [PLAIN, fallback] if is_seeded else [PLAIN, [*PLAIN, *fallback], fallback]
    # Answers are short, because each round takes its time.
    result, least_free = fill(tmp_path, engine, (0.92, 0.13), rounds, environment)

    described = result["described"]
    counted = {name: num_bytes >> 20 for name, num_bytes in described["cycle_bytes"].items()}
    num_retractions = [of_round["num_retractions"] for of_round in result["rounds"]]
    print(f"\n{described['kv_bytes_per_token']} bytes per token, room for {described['kv_capacity_tokens']} tokens")
    print(f"MiB counted: {counted}; free at the fullest of each round: {least_free}; retractions: {num_retractions}")
    assert result["running"] == RUNNING
    assert described["verified_as"] == ("chains" if is_seeded else "trees")
    assert is_seeded or (described["cycle_bytes"]["bigrams"] > 0 and described["cycle_bytes"]["texts"] > 0)
    per_layer = 2 * KV_HEADS * HEAD_DIM * 2
    assert described["kv_bytes_per_token"] == {"target": LAYERS * per_layer, "drafter": DRAFT_LAYERS * per_layer}
    assert_served(result)
    for of_round, kinds in zip(result["rounds"][1:], rounds[1:], strict=True):
        lens = zip(of_round["num_logprobs"], of_round["output_lens"])
        for i, (num_logprobs, output_len) in enumerate(lens):
            assert num_logprobs == (output_len if kinds[i % len(kinds)].get("return_logprob") else 0)
    assert min(least_free) > 0
    # SGLang has a row of the vocabulary per request of each penalty, of their sum and factor, and of biases; sums and
    # factors of every batch that it keeps until its results are there, and one is copied when requests come and go.
    # All 256 requests at once in the sampler would take a hundred rows more.
    row_bytes = SHAPE["vocab_size"] * 4 * RUNNING
    assert least_free[0] - min(least_free[1:]) <= counted["sampler"] + (16 * row_bytes >> 20)
