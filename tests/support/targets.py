"""Small targets of every class that this package serves: configs without weights, a drafter's config, and requests.

Drafts are the target's own continuation with errors (`tests/plugins/oracle_drafts.py`).
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from support.engine_process import run
from support.oracle.tree import Drafts, Text, Tree, accept_path, grow_tree
from support.plugins import python_path

BLOCK_SIZE = 16
VOCAB_SIZE, HIDDEN_SIZE, NUM_LAYERS = 512, 256, 4
WINDOW = 48
NUM_REQUESTS, NEW_TOKENS = 8, 160
# Candidates per depth of a tree, and ranks that the right token takes in turn (`oracle_drafts.RANKS`).
NUM_CANDIDATES, NUM_RANKS = 8, 3
# Share of drafts that are wrong.
ERROR_RATE = 0.1

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 512,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_LAYER_TYPES = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
_MLA = _COMMON | {
    "num_key_value_heads": 4,
    "head_dim": 64,
    "q_lora_rank": 128,
    # The smaller of two widths for which Triton has kernels of latent attention. It fits in float32 too.
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
}


@dataclass(frozen=True)
class Target:
    """One class of targets.

    Attributes:
        config: of the checkpoint.
        has_experts: rounding can exchange two experts of about equal score.
        tie: nats by which rounding in bf16 can move two logits; None for the usual distance.
        backends: SGLang's attention backends for the class in bf16 on a Hopper GPU, besides triton.
        engine: arguments of `sglang.Engine` that the class needs.
    """

    config: dict
    has_experts: bool = False
    tie: float | None = None
    backends: tuple[str, ...] = ("fa3", "flashinfer")
    engine: dict = field(default_factory=dict)


TARGETS = {
    "llama": Target(_COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}),
    "qwen3_moe": Target(
        _COMMON
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        has_experts=True,
    ),
    "gpt_oss": Target(
        _COMMON
        | {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "intermediate_size": 256,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "layer_types": _LAYER_TYPES,
            "sliding_window": WINDOW,
            "swiglu_limit": 7.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 2.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 1024,
            },
        },
        has_experts=True,
        backends=("fa3",),
        engine={"moe_runner_backend": "triton"},
    ),
    "deepseek_v3": Target(
        _MLA | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}, has_experts=True, backends=()
    ),
    "glm4_moe_lite": Target(
        _MLA
        | {
            "architectures": ["Glm4MoeLiteForCausalLM"],
            "model_type": "glm4_moe_lite",
            # Here it means qk_rope_head_dim.
            "head_dim": 32,
            "mlp_layer_types": ["dense"] + ["sparse"] * (NUM_LAYERS - 1),
        },
        has_experts=True,
        backends=(),
    ),
    "gemma4": Target(
        {name: value for name, value in _COMMON.items() if name not in ("rope_theta", "rope_scaling")}
        | {
            "architectures": ["Gemma4ForCausalLM"],
            "model_type": "gemma4_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": _LAYER_TYPES,
            "sliding_window": WINDOW,
            # Full layers with another head_dim need the multimodal config, whose towers are not wanted here.
            "per_layer_config": None,
            "v_head_dim": 64,
            "swa_num_key_value_heads": 2,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            },
        },
        # Scores are not divided by the root of head_dim, so rounding moves the weights of keys. Chains part as far.
        tie=1.5,
        backends=(),
    ),
    "qwen3_vl": Target(
        {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "image_token_id": 508,
            "video_token_id": 509,
            "vision_start_token_id": 506,
            "vision_end_token_id": 507,
            "tie_word_embeddings": False,
            "text_config": _COMMON
            | {
                "model_type": "qwen3_vl_text",
                "rope_scaling": {"rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True},
            },
            "vision_config": {
                "model_type": "qwen3_vl",
                "depth": 1,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_heads": 2,
                "out_hidden_size": HIDDEN_SIZE,
                "deepstack_visual_indexes": [],
                "num_position_embeddings": 256,
            },
        },
        engine={"enable_multimodal": False},
    ),
}
# As in Qwen3 checkpoints trained by z-lab.
DRAFTER = _COMMON | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": BLOCK_SIZE,
    "dflash_config": {"mask_token_id": VOCAB_SIZE - 1, "target_layer_ids": [0, 1, 2]},
    "num_target_layers": NUM_LAYERS,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 2,
}


def write_pair(folder: Path, name: str, dtype: str) -> dict:
    """Write configs of a target and a drafter. Return arguments of an Engine without speculation."""
    target = TARGETS[name]
    for part, config in (("target", target.config), ("drafter", DRAFTER)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        # gpt-oss takes the dtype of some weights from here.
        (folder / part / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}))
    paths = {"model_path": str(folder / "target"), "load_format": "dummy", "skip_tokenizer_init": True}
    return paths | {"dtype": dtype} | target.engine


def dflash(folder: Path, num_nodes: int | None = None) -> dict:
    """Return the additional arguments of an Engine with DFLASH. `num_nodes` is for trees; None for chains."""
    flags = {
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(folder / "drafter"),
        "speculative_eagle_topk": 1,
    }
    if num_nodes is not None:
        flags |= {"speculative_eagle_topk": NUM_CANDIDATES, "speculative_num_draft_tokens": num_nodes}
    return flags


def requests() -> list[dict]:
    """Return arguments of requests: prompts of 5 to 200 tokens, and answers that do not all end at once."""
    draw = random.Random(0)
    return [
        {
            "input_ids": [draw.randrange(2, VOCAB_SIZE - 16) for _ in range(5 + 195 * i // (NUM_REQUESTS - 1))],
            "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS - 8 * (i % 4), "ignore_eos": True},
        }
        for i in range(NUM_REQUESTS)
    ]


def drafts(prompt: list[int], answer: list[int]) -> list[int]:
    """Return the drafts for an answer: the same tokens, one in ten of them wrong."""
    draw = random.Random(len(prompt))
    return [token ^ 1 if draw.random() < ERROR_RATE else token for token in answer]


def candidate_logits() -> list[list[float]]:
    """Return the logits of a tree's candidates, [depth][rank]. No two sums of them are equal."""
    return [
        [-rank * (1 + 0.1 * (0.618 * depth % 1)) for rank in range(NUM_CANDIDATES)] for depth in range(BLOCK_SIZE - 1)
    ]


def candidates(token: int, position: int) -> list[int]:
    """Return the candidates of a position, as `oracle_drafts.Drafts.candidates` does: the draft, and others.

    Others are among the first `VOCAB_SIZE` tokens.
    """
    own = position % NUM_RANKS
    return [token if rank == own else (token + 2 + rank) % VOCAB_SIZE for rank in range(NUM_CANDIDATES)]


def grown_tree(text: list[int], drafted: list[int], num_nodes: int, vocab_size: int = VOCAB_SIZE) -> Tree:
    """Return the tree that is verified after a text.

    Args:
        text: tokens with the bonus token.
        drafted: the drafts after it. Past their end the draft is token 0.
        num_nodes: of the tree.
        vocab_size: of the target.
    """
    rows = torch.tensor(candidate_logits()).log_softmax(dim=-1)
    log_probs = torch.full((len(rows), vocab_size), -torch.inf)
    for depth, row in enumerate(rows):
        token = drafted[depth] if depth < len(drafted) else 0
        log_probs[depth, candidates(token, len(text) + depth)] = row
    return grow_tree(Drafts(log_probs, torch.arange(vocab_size), NUM_CANDIDATES, Text(text)), num_nodes)


def expected_cycles(
    prompt: list[int],
    answer: list[int],
    drafted: list[int],
    num_nodes: int | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> int:
    """Return the number of cycles of a request whose answer is `answer`.

    Each cycle ends with the token after the last draft that is right and, for trees, a node.
    """
    written, cycles = 1, 0
    while written < len(answer):
        if num_nodes is None:
            of_block = range(written, min(len(answer), written + BLOCK_SIZE - 1))
            num_right = len([*itertools.takewhile(lambda i: drafted[i] == answer[i], of_block)])
        else:
            tree = grown_tree(prompt + answer[:written], drafted[written:], num_nodes, vocab_size)
            wanted = answer[written:] + [-1] * BLOCK_SIZE
            num_right = len(accept_path(tree, torch.tensor([wanted[depth] for depth in tree.depths]))) - 1
        written, cycles = written + num_right + 1, cycles + 1
    return cycles


def drafting_environment(folder: Path, answers: list[dict], num_nodes: int | None = None) -> dict[str, str]:
    """Write the drafts for answers to `requests`. Return variables with which `oracle_drafts` drafts them."""
    asked = requests()
    known = [
        {"input_ids": request["input_ids"], "output_ids": drafts(request["input_ids"], answer["output_ids"])}
        for request, answer in zip(asked, answers, strict=True)
    ]
    (folder / "drafts.json").write_text(json.dumps(known))
    env = {"ORACLE_DRAFTS": str(folder / "drafts.json")}
    if num_nodes is not None:
        (folder / "candidates.json").write_text(json.dumps(candidate_logits()))
        env["ORACLE_CANDIDATES"] = str(folder / "candidates.json")
    return env


def with_cycles(plain: list[dict], answers: list[dict], num_nodes: int | None = None) -> list[tuple[dict, dict, int]]:
    """Return each answer without speculation, the one with DFLASH, and the cycles that its drafts should have taken."""
    prompts = [request["input_ids"] for request in requests()]
    return [
        (own, got, expected_cycles(prompt, own["output_ids"], drafts(prompt, own["output_ids"]), num_nodes))
        for prompt, own, got in zip(prompts, plain, answers, strict=True)
    ]


def generate(
    folder, name: str, dtype: str, flags: dict, env: dict, num_nodes: int | None = None
) -> list[tuple[dict, dict, int]]:
    """Return what `with_cycles` does, from two Engines, one after the other.

    Args:
        folder: keeps the answers without speculation for the next call with the same other arguments.
        name, dtype: of the target.
        flags: more arguments of the Engine.
        env: environment variables.
        num_nodes: of trees; None to verify chains.
    """
    engine = write_pair(folder, name, dtype) | flags
    env = env | {"PYTHONPATH": python_path("oracle_drafts")}
    asked = requests()
    call = {key: [request[key] for request in asked] for key in ("input_ids", "sampling_params")}
    kept = folder / "plain.json"
    if not kept.exists():
        [plain], described = run(folder, engine, [call | {"return_logprob": True, "top_logprobs_num": 2}], env)
        assert described is None
        kept.write_text(json.dumps(plain))
    plain = json.loads(kept.read_text())
    env |= drafting_environment(folder, plain, num_nodes)
    [answers], described = run(folder, engine | dflash(folder, num_nodes), [call], env)
    assert described["worker"] == "DFlashWorker"
    assert described["verified_rows"] == (num_nodes or BLOCK_SIZE)
    return with_cycles(plain, answers, num_nodes)


def assert_exact(answers: list[tuple[dict, dict, int]]) -> None:
    """Check that every answer equals the one without speculation, and takes the expected number of cycles."""
    # Texts that repeat would not depend on what attention sees.
    assert sum(len(set(plain["output_ids"])) > 20 for plain, _, _ in answers) >= NUM_REQUESTS / 2
    for plain, got, cycles in answers:
        assert got["output_ids"] == plain["output_ids"]
        assert got["meta_info"]["spec_verify_ct"] == cycles
