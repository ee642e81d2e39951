"""Drafts and greedy tokens by copies of a large lm_head, in CUDA graphs: those of its weights, also after an update.

The target writes a walk through its vocabulary: the token after t is `step * t + shift`. Its layers add nothing to
embeddings of ones and minus ones, and a row of its lm_head is the embedding of the token before. So no token of the
target is near a tie, and the int8 copy is exact. The drafter's hidden states are rows of the lm_head of a known text
(`tests/plugins/lm_head_drafts.py`). All of it is accepted if the lm_head's best tokens are found.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from engines import COMMON, GRAPH_SIZES, ON_CPU, EngineConfig, Engines, greedy
from safetensors.torch import save_file
from support.ties import tokens_per_cycle

from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.formats import to_qwen3_config
from sglang_dflash.checkpoint.tensors import expected_tensors

# The smallest lm_head with a shortlist has 2**28 numbers on each rank.
VOCAB_SIZE, HIDDEN_SIZE = (1 << 12, 256) if ON_CPU else (1 << 17, 2048)
BLOCK_SIZE, NUM_LAYERS = 16, 2
HEADS, HEAD_DIM, INTERMEDIATE_SIZE = 4, 64, 128
# The token after t is step * t + shift, before an update of the weights and after it.
WALKS = [(5, 77), (13, 1001)]
NEW_TOKENS = 96
PROMPTS = [[(7 * i + j * j) % VOCAB_SIZE for j in range(3 + 9 * i)] for i in range(16)]
# Rows that are computed at a time.
ROWS = 4096
NCCL = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def embeddings(hidden_size: int) -> torch.Tensor:
    """Return ones and minus ones that look random, [VOCAB_SIZE, hidden_size] bfloat16."""
    columns = torch.arange(hidden_size) * 2654435761 + 12345
    parts = []
    for first in range(0, VOCAB_SIZE, ROWS):
        mixed = (torch.arange(first, first + ROWS)[:, None] * 40503 + 1) * columns % 4294967291
        mixed = (mixed ^ (mixed >> 15)) * 2246822519 % 4294967291
        parts.append((1 - 2 * (mixed >> 13 & 1)).bfloat16())
    return torch.cat(parts)


def head_of(embedding: torch.Tensor, walk: tuple[int, int]) -> torch.Tensor:
    """Return the lm_head with which the target writes a walk."""
    step, shift = walk
    head = torch.empty_like(embedding)
    head[(torch.arange(VOCAB_SIZE) * step + shift) % VOCAB_SIZE] = embedding
    return head


def text_of(prompt: list[int], walk: tuple[int, int]) -> list[int]:
    """Return the target's text after a prompt."""
    step, shift = walk
    text = [prompt[-1]]
    while len(text) <= NEW_TOKENS:
        text.append((step * text[-1] + shift) % VOCAB_SIZE)
    return text[1:]


def config_of(hidden_size: int, **fields) -> dict:
    return {
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
    } | fields


def write_pair(folder: Path, hidden_size: int) -> None:
    """Write `target/`, its `update/`, which is another lm_head, and `drafter/`."""
    attention = HEADS * HEAD_DIM
    shapes = {
        "self_attn.q_proj.weight": (attention, hidden_size),
        "self_attn.k_proj.weight": (attention, hidden_size),
        "self_attn.v_proj.weight": (attention, hidden_size),
        "self_attn.o_proj.weight": (hidden_size, attention),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
        "mlp.gate_proj.weight": (INTERMEDIATE_SIZE, hidden_size),
        "mlp.up_proj.weight": (INTERMEDIATE_SIZE, hidden_size),
        "mlp.down_proj.weight": (hidden_size, INTERMEDIATE_SIZE),
        "input_layernorm.weight": (hidden_size,),
        "post_attention_layernorm.weight": (hidden_size,),
    }
    embedding = embeddings(hidden_size)
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(hidden_size).bfloat16()}
    for i in range(NUM_LAYERS):
        tensors |= {f"model.layers.{i}.{name}": torch.zeros(shape).bfloat16() for name, shape in shapes.items()}
    for name, walk in zip(("target", "update"), WALKS):
        (folder / name).mkdir(parents=True)
        config = config_of(hidden_size, architectures=["Qwen3ForCausalLM"])
        (folder / name / "config.json").write_text(json.dumps(config))
        head = {"lm_head.weight": head_of(embedding, walk)}
        save_file(tensors | head if name == "target" else head, folder / name / "model.safetensors")

    (folder / "drafter").mkdir()
    config = config_of(
        hidden_size,
        architectures=["DFlashDraftModel"],
        num_hidden_layers=1,
        num_target_layers=NUM_LAYERS,
        block_size=BLOCK_SIZE,
        dflash_config={"mask_token_id": 1, "target_layer_ids": [0]},
    )
    (folder / "drafter" / "config.json").write_text(json.dumps(config))
    expected = expected_tensors(DFlashConfig.from_dict(to_qwen3_config(config, "").to_dict(), ""))
    weights = {name: (0.02 * torch.randn(shape)).bfloat16() for name, shape in expected.items()}
    save_file(weights, folder / "drafter" / "model.safetensors")
    # Their texts differ, so a prompt has another first token after the update.
    known = [{"input_ids": prompt, "output_ids": text_of(prompt, WALKS[0])} for prompt in PROMPTS]
    known += [{"input_ids": [3, *prompt], "output_ids": text_of(prompt, WALKS[1])} for prompt in PROMPTS]
    (folder / "drafts.json").write_text(json.dumps(known))


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.alone(gpus=2))])
def ranks(request) -> int:
    if request.param > 1 and (ON_CPU or torch.cuda.device_count() < request.param):
        pytest.skip(f"needs {request.param} GPUs")
    return request.param


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shortlist")
    write_pair(folder, ranks * HIDDEN_SIZE)
    yield folder
    # Gigabytes.
    shutil.rmtree(folder)


def check(engines: Engines, config: EngineConfig, walk: tuple[int, int], prefix: list[int]) -> float:
    """Check answers of 4 requests, whose drafts an int4 copy chooses, and of all. Return tokens per cycle."""
    asked = [PROMPTS[:4], PROMPTS]
    calls = [greedy([prefix + prompt for prompt in prompts], NEW_TOKENS, flush=True) for prompts in asked]
    answers = engines.ask(config, calls)
    for prompts, of_call in zip(asked, answers, strict=True):
        assert [answer["output_ids"] for answer in of_call] == [text_of(prompt, walk) for prompt in prompts]
    return tokens_per_cycle([answer for of_call in answers for answer in of_call])


@pytest.mark.gpu
@pytest.mark.rehearsed
@pytest.mark.group("shortlist-{ranks}")
@pytest.mark.parametrize("shape", ["trees", "chains"], indirect=True)
def test_drafts_before_and_after_an_update(shape, ranks, folder, engines):
    arguments = COMMON | {
        "model_path": str(folder / "target"),
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(folder / "drafter"),
        "skip_tokenizer_init": True,
        "log_level": "info",
        "tp_size": ranks,
        "max_running_requests": len(PROMPTS),
        "cuda_graph_bs_decode": [*GRAPH_SIZES, len(PROMPTS)],
    }
    if shape == "chains":
        arguments["speculative_eagle_topk"] = 1
    env = {"LM_HEAD_DRAFTS": str(folder / "drafts.json")} | NCCL
    plugins = ("lm_head_drafts", "weight_copies") if ON_CPU else ("lm_head_drafts",)
    config = EngineConfig(f"shortlist-tp{ranks}-{shape}", arguments, env, plugins)

    before = check(engines, config, WALKS[0], [])
    log = engines.log(config)
    for copy in ("Drafts are chosen by copies of the lm_head in int4 and float8", "Greedy tokens are chosen by a copy"):
        assert copy in log
    # Graphs that compute no logits are replayed.
    assert "Loads a graph: greedy" in log
    [updated] = engines.ask(config, [{"method": "update_weights_from_disk", "model_path": str(folder / "update")}])
    assert updated[0], updated
    after = check(engines, config, WALKS[1], [3])

    print(f"\ntp {ranks}, {shape}: {before:.2f} tokens per cycle, {after:.2f} after the update")
    # 95 tokens after the first one, 16 at most in each of 6 cycles.
    assert before == after == (NEW_TOKENS - 1) / 6
