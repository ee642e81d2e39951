"""Draft length: it adapts by default on a GPU, flags fix it or ask for it, and obstacles are logged or refused."""

from __future__ import annotations

import logging

import pytest
from resolving import asked, keep_environment, on_gpu, refusal, resolve
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.arg_groups.overrides import declare_resolution, max_speculative_num_draft_tokens
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.speculative.adaptive_spec_params import resolve_candidate_steps_from_config
from support import hybrid
from support.gpus import GPUS

from models.tiny import DRAFTER_DIR, TARGET_DIR
from sglang_dflash.errors import ConfigError
from sglang_dflash.server_args import adaptive


def resolved(caplog, **flags) -> tuple[bool, list[str]]:
    """Return whether the draft length adapts on an H100, and the log lines about it."""
    caplog.clear()
    with GPUS["sm_90"].resolving(), caplog.at_level(logging.INFO):
        args = resolve(**on_gpu(**flags))
    lines = [record.getMessage() for record in caplog.records]
    return args.speculative_adaptive, [line for line in lines if "draft length" in line or "adaptive" in line]


@pytest.mark.parametrize("gpu", GPUS)
def test_it_adapts_on_every_gpu(gpu):
    with GPUS[gpu].resolving():
        args = asked(**on_gpu())
    assert resolved_view(args).speculative_adaptive is True
    # What the user said stays.
    assert args.speculative_adaptive is False
    # SGLang sizes its buffers by the drafter's block, not by the steps of EAGLE's adaptive speculation.
    assert max_speculative_num_draft_tokens(args) == 32 > max(resolve_candidate_steps_from_config()) + 1


@pytest.mark.parametrize(
    ("flags", "num_tokens", "most"),
    [
        ({}, 16, 32),
        ({"speculative_eagle_topk": 8}, 16, 32),
        ({"speculative_dflash_block_size": 5}, 5, 10),
        ({"tp_size": 2, "speculative_adaptive": True}, 16, 32),
        # The number is given, or does not adapt.
        ({"speculative_num_draft_tokens": 8}, 8, 8),
        ({"speculative_num_draft_tokens": 24, "speculative_eagle_topk": 8}, 24, 24),
        ({"speculative_adaptive_config": "fixed"}, 16, 16),
        ({"disable_cuda_graph": True}, 16, 16),
        # Chains.
        ({"speculative_eagle_topk": 1}, 16, 16),
        ({"speculative_dflash_block_size": 2}, 2, 2),
        # A larger tree would have more rows than the largest batch.
        ({"max_running_requests": 1}, 16, 16),
        ({"moe_a2a_backend": "deepep", "tp_size": 2, "ep_size": 2}, 16, 16),
        ({"device": "cpu", "attention_backend": "torch_native", "speculative_adaptive": True}, 16, 16),
    ],
    ids=str,
)
def test_small_batches_have_larger_trees(flags, num_tokens, most):
    with GPUS["sm_90"].resolving():
        args = asked(**on_gpu(**flags))
    assert resolved_view(args).speculative_num_draft_tokens == num_tokens
    assert max_speculative_num_draft_tokens(args) == most


def test_trees_of_recurrent_targets_do_not_grow(tmp_path):
    architecture = next(iter(hybrid.CONFIGS))
    hybrid.write_config(tmp_path / "target", architecture)
    drafter = hybrid.write_drafter(tmp_path / "drafter")
    with GPUS["sm_90"].resolving():
        args = asked(**on_gpu(model_path=str(tmp_path / "target"), speculative_draft_model_path=str(drafter)))
    assert resolved_view(args).speculative_adaptive is True
    assert max_speculative_num_draft_tokens(args) == 16


@pytest.mark.parametrize(
    "flags",
    [
        {"speculative_eagle_topk": 1},
        {"speculative_eagle_topk": 8, "speculative_num_draft_tokens": 32},
        {"speculative_num_draft_tokens": 8},
        {"speculative_dflash_block_size": 4},
        {"tp_size": 2},
        {"enable_lora": False, "lora_paths": ["adapter"]},
    ],
    ids=str,
)
def test_it_adapts_with_other_flags(caplog, flags):
    assert resolved(caplog, **flags) == (True, [])
    assert resolved(caplog, **flags, speculative_adaptive=True) == (True, [])


def test_servers_without_cycles_say_nothing(caplog):
    assert resolved(caplog, disaggregation_mode="prefill") == (False, [])
    assert resolved(caplog, disaggregation_mode="decode") == (True, [])


def test_a_flag_fixes_it(caplog):
    assert resolved(caplog, speculative_adaptive_config="fixed") == (False, [])


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"disable_cuda_graph": True}, "CUDA graphs of decoding are disabled"),
        ({"disable_decode_cuda_graph": True}, "CUDA graphs of decoding are disabled"),
        ({"cuda_graph_backend_decode": "disabled"}, "CUDA graphs of decoding are disabled"),
        (
            {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": ["q_proj"]},
            "SGLang's graphs with --enable-lora are for one length",
        ),
        ({"lora_paths": ["adapter"]}, "SGLang's graphs with --lora-paths are for one length"),
        (
            {"enable_deterministic_inference": True},
            "the choice depends on measured times, and --enable-deterministic-inference excludes what they change",
        ),
        (
            {"rl_on_policy_target": "fsdp"},
            "results would not always round as --rl-on-policy-target fsdp asks",
        ),
    ],
    ids=str,
)
def test_what_fixes_it_says_why(caplog, monkeypatch, flags, reason):
    keep_environment(monkeypatch)
    assert resolved(caplog, **flags) == (False, [f"The draft length is fixed: {reason}."])
    # A user who asks for it needs no reason.
    assert resolved(caplog, **flags, speculative_adaptive_config="fixed") == (False, [])


def test_it_is_fixed_on_a_cpu_without_a_flag(caplog):
    with caplog.at_level(logging.INFO):
        assert resolve(device="cpu", attention_backend="torch_native", dtype="float32").speculative_adaptive is False
    assert not [record for record in caplog.records if "draft length" in record.getMessage()]
    assert resolve(speculative_adaptive=True).speculative_adaptive is True


def test_bad_values():
    message = refusal(speculative_adaptive_config="adaptive.json")
    assert message.startswith("--speculative-adaptive-config adaptive.json: DFLASH measures which draft length is best")
    message = refusal(speculative_adaptive_config="fixed", speculative_adaptive=True)
    assert message.startswith("--speculative-adaptive and --speculative-adaptive-config fixed: leave one")


def test_asked_for_without_graphs():
    with GPUS["sm_90"].resolving():
        message = refusal(**on_gpu(disable_cuda_graph=True, speculative_adaptive=True))
    assert message.startswith("--speculative-adaptive verifies in CUDA graphs")
    assert "leave out --disable-cuda-graph" in message


def test_asked_for_with_determinism_on_flashinfer():
    args = asked(speculative_adaptive=True)
    declare_resolution(args, "test", attention_backend="flashinfer")
    adaptive.check_deterministic(args)
    declare_resolution(args, "test", enable_deterministic_inference=True)
    with pytest.raises(ConfigError, match=r"^--speculative-adaptive with --enable-deterministic-inference.*flashinfer"):
        adaptive.check_deterministic(args)
    declare_resolution(args, "test", attention_backend="triton")
    adaptive.check_deterministic(args)


def test_other_algorithms_do_not_adapt_by_default():
    shape = {"speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3}
    with GPUS["sm_90"].resolving():
        eagle = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(TARGET_DIR)}
        assert resolve(**on_gpu(**eagle, **shape)).speculative_adaptive is False


@pytest.mark.parametrize("way", ["flags", "file"])
def test_command_lines_and_configuration_files(tmp_path, way):
    """SGLang writes a file's entries as flags."""
    model = ["--model-path", str(TARGET_DIR), "--speculative-algorithm", "DFLASH"]
    model += ["--speculative-draft-model-path", str(DRAFTER_DIR)]
    said = ["--speculative-adaptive-config", "fixed"]
    if way == "file":
        file = tmp_path / "server.yaml"
        file.write_text("speculative-adaptive-config: fixed\n")
        said = ["--config", str(file)]
    args: ServerArgs = prepare_server_args([*model, "--device", "cuda", "--dtype", "bfloat16", *said])
    with GPUS["sm_90"].resolving():
        args.resolve_once()
    assert resolved_view(args).speculative_adaptive is False
