"""SGLang's resolution on GPUs that this machine does not have: every default serves, and a flag that names a default
changes nothing."""

from __future__ import annotations

import logging

import pytest
from resolving import asked, keep_environment, on_gpu, refusal, resolve
from sglang.srt.arg_groups.model_override_base import attention_backends_of
from sglang.srt.runtime_context import override_platform
from support import hybrid, targets
from support.gpus import GPUS

from models.tiny import TARGET_DIR
from sglang_dflash.server_args.backends import draft_attention_backends
from sglang_dflash.server_args.trees import verifies_trees

# By kind of target and compute capability: the attention backend of the target and of the drafter.
SAME_AS_TARGET = dict.fromkeys(GPUS, "flashinfer") | {"sm_90": "fa3"}
ON_TRITON = dict.fromkeys(GPUS, "triton")
BLACKWELL = ("sm_100", "sm_103")
TRTLLM_MHA, TRTLLM_MLA = (dict.fromkeys(BLACKWELL, backend) for backend in ("trtllm_mha", "trtllm_mla"))
TARGET_BACKENDS = {
    "tiny": SAME_AS_TARGET | TRTLLM_MHA,
    "llama": SAME_AS_TARGET | TRTLLM_MHA,
    "qwen3_moe": SAME_AS_TARGET | TRTLLM_MHA,
    "qwen3_vl": SAME_AS_TARGET | TRTLLM_MHA,
    "hybrid": SAME_AS_TARGET | TRTLLM_MHA,
    # FlashInfer has no sinks.
    "gpt_oss": ON_TRITON | {"sm_90": "fa3"} | TRTLLM_MHA,
    "gemma4": ON_TRITON | TRTLLM_MHA,
    "deepseek_v3": ON_TRITON | {"sm_90": "fa3"} | TRTLLM_MLA,
    "glm4_moe_lite": ON_TRITON | {"sm_90": "fa3"} | dict.fromkeys(BLACKWELL, "flashinfer"),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Arguments that name a target of each kind, and its drafter."""
    folder = tmp_path_factory.mktemp("pairs")
    found = {"tiny": {}}
    drafter = str(hybrid.write_drafter(folder / "hybrid" / "drafter"))
    hybrid.write_config(folder / "hybrid" / "target", "Qwen3_5ForCausalLM")
    found["hybrid"] = {"model_path": str(folder / "hybrid" / "target"), "speculative_draft_model_path": drafter}
    for name in targets.TARGETS:
        arguments = targets.write_pair(folder / name, name, "bfloat16")
        found[name] = arguments | {"speculative_draft_model_path": str(folder / name / "drafter")}
    return found


@pytest.mark.parametrize("flags", [{}, {"speculative_eagle_topk": 1}, {"kv_cache_dtype": "fp8_e4m3"}], ids=str)
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("kind", TARGET_BACKENDS)
def test_defaults(pairs, kind, gpu, flags):
    target_backend = TARGET_BACKENDS[kind][gpu]
    with GPUS[gpu].resolving():
        args = resolve(**on_gpu(**pairs[kind], **flags))

    assert attention_backends_of(args) == (target_backend, target_backend)
    draft_backend = "triton" if target_backend.startswith("trtllm") else target_backend
    assert args.speculative_draft_attention_backend == draft_backend
    assert args.page_size == (64 if target_backend.startswith("trtllm") else 1)


# Each names what is served without it: 16 is the block size of the tiny pair.
NAMED_DEFAULTS = [
    {"speculative_eagle_topk": 1},
    {"speculative_eagle_topk": 8},
    {"speculative_eagle_topk": 16},
    {"speculative_eagle_topk": 8, "speculative_num_draft_tokens": 16},
    {"speculative_dflash_block_size": 16},
    {"speculative_num_steps": 1},
    {"speculative_adaptive": True},
]


@pytest.mark.parametrize("flags", NAMED_DEFAULTS, ids=str)
@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize("gpu", GPUS)
def test_flag_that_names_the_default_changes_nothing(gpu, page_size, flags):
    """SGLang moves EAGLE's trees, and its chains in pages, to another attention backend. It must not move ours."""
    with GPUS[gpu].resolving():
        default = asked(**on_gpu(page_size=page_size)).resolved_dict()
        named = asked(**on_gpu(page_size=page_size, **flags)).resolved_dict()

    assert {name for name, value in default.items() if named[name] != value} == set()


@pytest.mark.parametrize(("kind", "named", "running"), [("tiny", None, 64), ("hybrid", None, 48), ("tiny", 48, 48)])
def test_requests_at_a_time(pairs, caplog, kind, named, running):
    with caplog.at_level(logging.INFO, logger="sglang_dflash.server_args"), GPUS["sm_90"].resolving():
        resolved = resolve(**on_gpu(**pairs[kind]), max_running_requests=named)
    assert resolved.max_running_requests == running
    assert (f"DFLASH serves up to {running} requests at a time" in caplog.text) == (named is None)


@pytest.mark.parametrize("gpu", GPUS)
def test_trees_of_more_nodes_keep_the_backend(gpu):
    with GPUS[gpu].resolving():
        default = resolve(**on_gpu())
        trees = resolve(**on_gpu(speculative_eagle_topk=16, speculative_num_draft_tokens=32))

    assert trees.speculative_num_draft_tokens == 32
    assert (trees.attention_backend, trees.page_size) == (default.attention_backend, default.page_size)


def test_other_algorithms_keep_their_flag():
    shape = {"speculative_num_steps": 2, "speculative_eagle_topk": 8, "speculative_num_draft_tokens": 8}
    with GPUS["sm_90"].resolving():
        args = resolve(**on_gpu(speculative_algorithm="EAGLE", speculative_draft_model_path=str(TARGET_DIR), **shape))
    assert (args.speculative_eagle_topk, args.attention_backend) == (8, "flashinfer")


@pytest.mark.parametrize("gpu", ["sm_90", *BLACKWELL, "sm_120"])
@pytest.mark.parametrize("backend", ["trtllm_mha", "fa4"])
def test_drafter_of_a_target_on_a_backend_without_blocks(gpu, backend, caplog):
    """The same where the user has named the target's backend."""
    with GPUS[gpu].resolving(), caplog.at_level(logging.INFO, logger="sglang_dflash"):
        args = resolve(**on_gpu(attention_backend=backend))

    assert (args.attention_backend, args.speculative_draft_attention_backend) == (backend, "triton")
    [line] = [record.getMessage() for record in caplog.records if "attention" in record.getMessage()]
    assert line == (
        f"DFLASH's drafter runs on triton: it has no attention on {backend}, the target's. "
        "--speculative-draft-attention-backend names another."
    )


def test_drafter_on_the_targets_backend_is_not_logged(caplog):
    with GPUS["sm_90"].resolving(), caplog.at_level(logging.INFO, logger="sglang_dflash"):
        resolve(**on_gpu())
    assert not [record for record in caplog.records if "drafter runs on" in record.getMessage()]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("backend", ["trtllm_mha", "fa4", "flashmla"])
def test_refusals_name_what_the_gpu_has(gpu, backend):
    with GPUS[gpu].resolving():
        message = refusal(**on_gpu(speculative_draft_attention_backend=backend))

    able = "flashinfer, triton" if GPUS[gpu].sm >= 100 else "fa3, flashinfer, triton"
    assert message == (
        f"--speculative-draft-attention-backend {backend}: DFLASH's drafter runs on {able} on this GPU "
        f"({GPUS[gpu].name}); choose one of them with --speculative-draft-attention-backend."
    )


@pytest.mark.parametrize("gpu", [*BLACKWELL, "sm_120"])
@pytest.mark.parametrize("flag", ["speculative_draft_attention_backend", "attention_backend"])
def test_fa3_ends_with_hopper(gpu, flag):
    with GPUS[gpu].resolving():
        message = refusal(**on_gpu(**{flag: "fa3"}))
    assert message.startswith(f"--{flag.replace('_', '-')} fa3: DFLASH's drafter runs on flashinfer, triton on")


@pytest.mark.parametrize("gpu", GPUS)
def test_named_backends_are_kept(gpu):
    with GPUS[gpu].resolving():
        able = draft_attention_backends(asked(**on_gpu()))
        for backend in able:
            args = resolve(**on_gpu(speculative_draft_attention_backend=backend))
            assert args.speculative_draft_attention_backend == backend
    assert "triton" in able


def test_gpu_without_flashinfer():
    with GPUS["sm_120"].resolving(), override_platform(has_flashinfer=False):
        assert resolve(**on_gpu()).speculative_draft_attention_backend == "triton"
        message = refusal(**on_gpu(speculative_draft_attention_backend="flashinfer"))
    assert "drafter runs on triton on this GPU (sm_120)" in message


def chain_lines(caplog, **flags) -> list[str]:
    """Log lines that say why drafts are verified in chains; each resolution has its own."""
    caplog.clear()
    with GPUS["sm_90"].resolving(), caplog.at_level(logging.INFO, logger="sglang_dflash"):
        args = asked(**on_gpu(**flags))
    lines = [record.getMessage() for record in caplog.records if "in chains, not in trees" in record.getMessage()]
    assert verifies_trees(args) == (not lines and args.speculative_eagle_topk != 1)
    return [line.removeprefix("Drafts are verified in chains, not in trees: ") for line in lines]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            {"enable_deterministic_inference": True},
            "a tree's results depend on its batch, which --enable-deterministic-inference excludes.",
        ),
        (
            {"rl_on_policy_target": "fsdp"},
            "a tree's results do not round as --rl-on-policy-target fsdp asks.",
        ),
        ({"speculative_dflash_block_size": 3}, "blocks of 3 tokens are no trees, which have 4 to 64 nodes."),
        ({"speculative_num_draft_tokens": 2}, "blocks of 2 tokens are no trees, which have 4 to 64 nodes."),
    ],
    ids=str,
)
def test_chains_that_nobody_asked_for_say_why(caplog, monkeypatch, flags, reason):
    keep_environment(monkeypatch)
    assert chain_lines(caplog, **flags) == [reason]
    # A user who asks for chains needs no reason.
    assert chain_lines(caplog, speculative_eagle_topk=1, **flags) == []


@pytest.mark.parametrize("topk", [None, 8])
def test_recurrent_targets_have_trees(caplog, pairs, topk):
    assert chain_lines(caplog, speculative_eagle_topk=topk, **pairs["hybrid"]) == []


@pytest.mark.parametrize("topk", [None, 1, 8])
def test_trees_and_named_chains_log_no_reason(caplog, topk):
    assert chain_lines(caplog, speculative_eagle_topk=topk) == []
