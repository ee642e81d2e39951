"""Flags that DFLASH cannot honour: no server starts, and one sentence names the flag and its value. Those that it can
honour are accepted, and what it changes is logged."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import pytest
from resolving import DEVICE_ARGS, ON_CPU, drafter_with, refusal, resolve
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs

from sglang_dflash.arguments import (
    DRAFT_BACKENDS,
    UNSUPPORTED,
    UNSUPPORTED_PREFIXES,
    check_adaptive,
    draft_attention_backend,
)
from sglang_dflash.config import ConfigError
from sglang_dflash.tiny_pair import DRAFTER_DIR, TARGET_DIR


def test_good_arguments():
    args = resolve()
    assert args.speculative_num_draft_tokens == 16
    assert (args.speculative_num_steps, args.speculative_eagle_topk) == (1, 1)


BLOCK_SIZE_FLAGS = ["speculative_dflash_block_size", "speculative_num_draft_tokens"]


@pytest.mark.parametrize("flag", BLOCK_SIZE_FLAGS)
@pytest.mark.parametrize("value", [-1, 0, 1, 17, 32])
def test_block_size(flag, value):
    message = refusal(**{flag: value})
    assert message.startswith(f"--{flag.replace('_', '-')} {value}:")
    assert "at least 2" in message and "at most 16" in message


def test_block_sizes_contradict():
    message = refusal(speculative_dflash_block_size=8, speculative_num_draft_tokens=4)
    assert "--speculative-dflash-block-size 8 and --speculative-num-draft-tokens 4 contradict" in message


@pytest.mark.parametrize("flags", [BLOCK_SIZE_FLAGS[:1], BLOCK_SIZE_FLAGS[1:], BLOCK_SIZE_FLAGS])
def test_smaller_block_size_is_served_and_logged(flags, caplog):
    with caplog.at_level(logging.INFO, logger="sglang_dflash.arguments"):
        args = resolve(**dict.fromkeys(flags, 8))
    assert args.speculative_num_draft_tokens == 8
    lines = [record.getMessage() for record in caplog.records if "blocks of" in record.getMessage()]
    assert lines == ["DFLASH serves blocks of 8; the drafter was trained with 16."]


@pytest.mark.parametrize(
    ("flag", "value"), [("speculative_num_steps", 3), ("speculative_num_steps", 0), ("speculative_eagle_topk", 4)]
)
def test_eagle_shape(flag, value):
    assert refusal(**{flag: value}).startswith(f"--{flag.replace('_', '-')} {value}:")


def test_eagle_shape_of_one_is_accepted():
    assert resolve(speculative_num_steps=1, speculative_eagle_topk=1).speculative_num_steps == 1


# Values that SGLang itself lets through to the point where speculation is resolved.
UNSUPPORTED_VALUES = {
    "pp_size": 2,
    "dcp_size": 2,
    "attn_cp_size": 2,
    "disaggregation_mode": "decode",
    "lora_paths": ["adapter"],
    "dllm_algorithm": "LowConfidence",
    "torchao_config": "int8wo",
    "speculative_adaptive_config": "adaptive.json",
    "speculative_token_map": "map.pt",
    "speculative_accept_threshold_single": 0.0,
    "speculative_accept_threshold_acc": 0.5,
    "speculative_moe_runner_backend": "triton",
    "speculative_moe_a2a_backend": "deepep",
    "decrypted_draft_config_file": "config.json",
    "spec_trace_dir": "traces",
    "speculative_ngram_capacity": 5,
    "speculative_dspark_block_size": 4,
    "decoupled_spec_role": "verifier",
}
# What such a flag needs beside it to be let through.
COMPANIONS = {
    "dcp_size": {"tp_size": 2},
    "attn_cp_size": {"tp_size": 2},
    "enable_prefill_cp": {"cp_strategy": "zigzag"},
    "enable_dp_attention": {"tp_size": 2, "dp_size": 2},
}


def test_unsupported_fields_exist():
    fields = {field.name for field in dataclasses.fields(ServerArgs)}
    assert set(UNSUPPORTED) <= fields
    for prefix in UNSUPPORTED_PREFIXES:
        assert any(field.startswith(prefix) for field in fields)


@pytest.mark.parametrize("field", [*UNSUPPORTED, *sorted(set(UNSUPPORTED_VALUES) - set(UNSUPPORTED))])
def test_unsupported_flag(field):
    value = UNSUPPORTED_VALUES.get(field, True)
    message = refusal(**{field: value} | COMPANIONS.get(field, {}))
    flag = "--" + field.replace("_", "-")
    assert message == f"{flag} {value} is not supported with --speculative-algorithm DFLASH."


@pytest.mark.parametrize("field", ["enable_lora", "enable_two_batch_overlap", "lora_paths"])
def test_flag_that_is_off_is_accepted(field):
    resolve(**{field: [] if field == "lora_paths" else False})


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"speculative_draft_model_quantization": "fp8"}, "--speculative-draft-model-quantization fp8"),
        (
            {"quantization": "fp8", "speculative_draft_model_quantization": "w8a8_int8"},
            "--speculative-draft-model-quantization w8a8_int8",
        ),
        ({"kv_cache_dtype": "fp4_e2m1"}, "--kv-cache-dtype fp4_e2m1"),
        (
            {"speculative_draft_attention_backend": "flashmla"},
            "--speculative-draft-attention-backend flashmla: DFLASH's drafter runs on",
        ),
        (
            {"speculative_draft_attention_backend": "no-such"},
            "--speculative-draft-attention-backend no-such: DFLASH's drafter runs on",
        ),
    ],
)
def test_drafter_flags(flags, named):
    assert named in refusal(**flags)


@pytest.mark.parametrize("flags", [{}, {"speculative_draft_model_quantization": "unquant"}])
def test_unquantised_drafter_of_a_quantised_target(flags):
    server_args = resolve(quantization="fp8", **flags)

    assert ModelConfig.from_server_args(server_args).quantization == "fp8"
    assert ModelConfig.from_server_args(server_args, str(DRAFTER_DIR), is_draft_model=True).quantization is None


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "fp8_e4m3", "fp8_e5m2"])
def test_kv_dtype(kv_cache_dtype):
    assert resolve(kv_cache_dtype=kv_cache_dtype).kv_cache_dtype == kv_cache_dtype


def test_kv_dtype_that_the_drafters_backend_cannot_read():
    cuda = SimpleNamespace(
        device="cuda",
        attention_backend="flashinfer",
        decode_attention_backend=None,
        prefill_attention_backend=None,
        speculative_draft_attention_backend="fa3",
        kv_cache_dtype="fp8_e4m3",
    )
    assert draft_attention_backend(cuda, DRAFT_BACKENDS["cuda"]) == "fa3"
    cuda.kv_cache_dtype = "fp8_e5m2"
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8_e5m2.*backend flashinfer or triton"):
        draft_attention_backend(cuda, DRAFT_BACKENDS["cuda"])


@pytest.mark.parametrize("window", [0, -5])
def test_draft_window_size(window):
    assert f"--speculative-draft-window-size must be at least 1, got {window}" in refusal(
        speculative_draft_window_size=window
    )


def test_adaptive_needs_graphs():
    """A CPU needs none, so on a machine without a GPU the device changes once everything else is resolved."""
    args = resolve(**{"disable_cuda_graph": True} | DEVICE_ARGS)
    args.override("test", device="cuda")
    check_adaptive(args)
    args.override("test", speculative_adaptive=True)
    with pytest.raises(ConfigError, match=r"^--speculative-adaptive.* leave out --disable-cuda-graph"):
        check_adaptive(args)


@pytest.mark.skipif(not ON_CPU, reason="names what the CPU offers")
def test_target_backend_does_not_suit_the_drafter():
    message = refusal(attention_backend="fa3")
    assert "--attention-backend fa3" in message and "torch_native, triton on cpu" in message


# On the right side of a row, in one block.
NARROW_ON_BOTH_SIDES = {"use_sliding_window": True, "sliding_window": 8, "is_causal": False}


def test_layer_that_the_drafters_backend_cannot_mask(tmp_path):
    path = drafter_with(tmp_path, **NARROW_ON_BOTH_SIDES)
    message = refusal(speculative_draft_model_path=path, speculative_draft_attention_backend="triton")
    able = "torch_native" if ON_CPU else "fa3"
    assert message == (
        f"layer 0 of drafter {path} has a bidirectional sliding_window=8, narrower than the block of 16: triton cannot "
        f"limit what a row sees to its right; set --speculative-draft-attention-backend {able}."
    )


@pytest.mark.parametrize(
    "flags",
    [
        {"speculative_draft_attention_backend": "torch_native" if ON_CPU else "fa3"},
        {"speculative_draft_attention_backend": "triton", "speculative_dflash_block_size": 8},
    ],
)
def test_layer_that_the_drafters_backend_can_mask(tmp_path, flags):
    resolve(speculative_draft_model_path=drafter_with(tmp_path, **NARROW_ON_BOTH_SIDES), **flags)


def test_mixed_chunk_is_switched_off_and_logged(caplog):
    with caplog.at_level(logging.WARNING, logger="sglang_dflash.arguments"):
        assert resolve(enable_mixed_chunk=True).enable_mixed_chunk is False
    assert any("--enable-mixed-chunk is off" in record.getMessage() for record in caplog.records)


def test_other_servers_are_left_alone():
    args = ServerArgs(model_path=str(TARGET_DIR), **DEVICE_ARGS, enable_return_routed_experts=True)
    assert args.speculative_algorithm is None and args.speculative_num_draft_tokens is None
