"""A DFLASH server that cannot serve right does not start, and one sentence names the flag or field and its value.

Most cases resolve SGLang's own `ServerArgs` in this process, as `launch_server` does before it starts anything.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.plugins import load_plugins
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

load_plugins()

ON_CPU = not torch.cuda.is_available()
DEVICE_ARGS = {"device": "cpu", "attention_backend": "torch_native", "dtype": "float32"} if ON_CPU else {}
DFLASH_ARGS = {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(DRAFTER_DIR)}


def resolve(**changes) -> ServerArgs:
    return ServerArgs(**{"model_path": str(TARGET_DIR)} | DEVICE_ARGS | DFLASH_ARGS | changes)


def refusal(**changes) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(**changes)
    message = str(caught.value)
    assert "\n" not in message
    return message


def checkpoint(source: Path, path: Path, config: dict | None = None, tensors: dict | None = None) -> str:
    """A copy of one of the tiny pair's checkpoints.

    Args:
        config: fields that replace those of `config.json`; None removes one.
        tensors: tensors that replace those of the same name; None removes one.
    """
    shutil.copytree(source, path)
    fields = json.loads((source / "config.json").read_text()) | (config or {})
    (path / "config.json").write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    if tensors:
        kept = load_file(source / "model.safetensors") | tensors
        kept = {name: tensor for name, tensor in kept.items() if tensor is not None}
        save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


def drafter_with(tmp_path: Path, **fields) -> str:
    dflash_config = json.loads((DRAFTER_DIR / "config.json").read_text())["dflash_config"]
    inner = {name: fields.pop(name) for name in ("mask_token_id", "target_layer_ids") if name in fields}
    if inner:
        fields["dflash_config"] = {k: v for k, v in (dflash_config | inner).items() if v is not None}
    return checkpoint(DRAFTER_DIR, tmp_path / "drafter", config=fields)


def test_good_arguments():
    args = resolve()
    assert args.speculative_num_draft_tokens == 16
    assert (args.speculative_num_steps, args.speculative_eagle_topk) == (1, 1)


# --- the drafter's path ---------------------------------------------------------------------------------------------


def test_path_left_out():
    assert "set --speculative-draft-model-path" in refusal(speculative_draft_model_path=None)


def test_path_does_not_exist(tmp_path):
    path = str(tmp_path / "none")
    assert refusal(speculative_draft_model_path=path).startswith(f"--speculative-draft-model-path {path}: there is no")


def test_path_without_config(tmp_path):
    message = refusal(speculative_draft_model_path=str(tmp_path))
    assert str(tmp_path) in message and "config.json" in message


@pytest.mark.skipif(os.environ.get("HF_HUB_OFFLINE") != "1", reason="would ask the Hugging Face hub")
def test_path_is_no_repository():
    message = refusal(speculative_draft_model_path="nobody/no-such-drafter")
    assert message.startswith("--speculative-draft-model-path nobody/no-such-drafter cannot be read: ")


def test_path_is_not_even_a_repository_name():
    message = refusal(speculative_draft_model_path="~/drafter of mine")
    assert message.startswith("--speculative-draft-model-path ~/drafter of mine cannot be read: ")


def test_config_is_no_json(tmp_path):
    (tmp_path / "config.json").write_text("{")
    message = refusal(speculative_draft_model_path=str(tmp_path))
    assert message.startswith(f"--speculative-draft-model-path {tmp_path} cannot be read: ")


def test_model_type_is_unknown(tmp_path):
    message = refusal(speculative_draft_model_path=drafter_with(tmp_path, model_type="no-such-type"))
    assert message.startswith("model_type='no-such-type' in config.json of drafter ")


def test_target_as_drafter():
    message = refusal(speculative_draft_model_path=str(TARGET_DIR))
    assert "is not a DFlash checkpoint" in message and "Qwen3ForCausalLM" in message


def test_dflash_config_is_no_object(tmp_path):
    path = checkpoint(DRAFTER_DIR, tmp_path / "drafter", config={"dflash_config": [1, 2]})
    assert "is not a DFlash checkpoint" in refusal(speculative_draft_model_path=path)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "is a DFlash2 checkpoint"),
        ({"architectures": ["DominoDraftModel"]}, "is a Domino checkpoint"),
        ({"speculators_model_type": "dspark", "model_type": "speculator_model"}, "is a DSpark checkpoint"),
        ({"speculators_model_type": "eagle3", "model_type": "speculator_model"}, "speculators_model_type='eagle3'"),
    ],
)
def test_other_drafters(tmp_path, config, named):
    path = checkpoint(DRAFTER_DIR, tmp_path / "drafter", config=config)
    message = refusal(speculative_draft_model_path=path)
    assert message.startswith(f"--speculative-draft-model-path {path} is ") and named in message


# --- a drafter that makes no sense, or was trained for another target -----------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_size": 128}, "hidden_size=128"),
        ({"vocab_size": 2048}, "vocab_size=2048"),
        ({"num_target_layers": 6}, "num_target_layers=6"),
        ({"num_target_layers": None}, "num_target_layers=None"),
        ({"target_layer_ids": [0, 1, 3]}, "names [3]"),
        ({"target_layer_ids": [0, 1, 40]}, "names [40]"),
        ({"target_layer_ids": [-1, 0, 1]}, "names [-1]"),
        ({"target_layer_ids": [2, 1, 0]}, "target_layer_ids=[2, 1, 0]"),
        ({"target_layer_ids": [1, 1, 2]}, "target_layer_ids=[1, 1, 2]"),
        ({"target_layer_ids": []}, "target_layer_ids=[]"),
        ({"target_layer_ids": 2}, "target_layer_ids=2"),
        ({"target_layer_ids": ["0"]}, "target_layer_ids=['0']"),
        ({"mask_token_id": 1024}, "mask_token_id=1024"),
        ({"mask_token_id": -1}, "mask_token_id=-1"),
        ({"mask_token_id": None}, "mask_token_id=None"),
        ({"block_size": 1}, "block_size=1"),
        ({"block_size": "16"}, "block_size='16'"),
        ({"block_size": None}, "block_size=None"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"max_position_embeddings": 1024}, "max_position_embeddings=1024"),
    ],
)
def test_drafter_field(tmp_path, fields, named):
    path = drafter_with(tmp_path, **fields)
    message = refusal(speculative_draft_model_path=path)
    assert named in message and path in message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types=['full_attention']"),
        ({"layer_types": ["full_attention", "odd", "odd"]}, "'odd'"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 0}, "sliding_window=0"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 1}, "sliding_window=1"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": None}, "sliding_window=None"),
        ({"use_swa": False}, "use_sliding_window, use_swa=[True, False]"),
        ({"use_swa": 1}, "use_swa=1"),
        ({"is_causal": "no"}, "is_causal='no'"),
    ],
)
def test_drafter_layers(tmp_path, fields, named):
    """Where transformers itself refuses the value, its sentence is passed on."""
    layers = json.loads((DRAFTER_DIR / "config.json").read_text())["num_hidden_layers"]
    if len(fields.get("layer_types", ())) == 3:
        fields = fields | {"layer_types": (fields["layer_types"] * layers)[:layers]}
    path = drafter_with(tmp_path, use_sliding_window=True, **fields)
    message = refusal(speculative_draft_model_path=path)
    assert path in message
    assert named in message or "layer_types" in message


def test_shorter_context_is_allowed_where_it_is_served(tmp_path):
    path = drafter_with(tmp_path, max_position_embeddings=1024)
    assert resolve(speculative_draft_model_path=path, context_length=1024).context_length == 1024


@pytest.mark.parametrize(
    ("tp_size", "fields", "named"),
    [
        (3, {}, "num_attention_heads=4"),
        (2, {"intermediate_size": 385}, "intermediate_size=385"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 6}, "num_key_value_heads=6"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 3}, "num_key_value_heads=3"),
    ],
)
def test_tensor_parallel_size(tmp_path, tp_size, fields, named):
    path = drafter_with(tmp_path, **fields)
    message = refusal(speculative_draft_model_path=path, tp_size=tp_size)
    assert named in message and f"--tp-size {tp_size}" in message


def test_more_ranks_than_kv_heads():
    assert resolve(tp_size=4).tp_size == 4


def test_recurrent_target(tmp_path):
    config = {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    }
    target = checkpoint(TARGET_DIR, tmp_path / "target", config=config)
    message = refusal(model_path=target, disable_radix_cache=True)
    assert "Lfm2ForCausalLM" in message and "recurrent layers" in message


# --- flags ----------------------------------------------------------------------------------------------------------

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


# --- real servers ---------------------------------------------------------------------------------------------------


def launch(tmp_path: Path, *flags: str) -> str:
    """What `launch_server` writes to stderr before it ends by itself, in error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--port", str(port), "--max-total-tokens", "4096"]
    command += ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"]
    stderr = tmp_path / "stderr"
    with stderr.open("wb") as file:
        server = subprocess.Popen(
            [*command, "--speculative-algorithm", "DFLASH", *flags],
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,
        )
        try:
            status = server.wait(timeout=180)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            pytest.fail(f"still running:\n{stderr.read_text()[-4000:]}")
    assert status != 0
    return stderr.read_text()


on_cpu = pytest.mark.skipif(not ON_CPU, reason="serves on the CPU")


def target_and_drafter(target: object, drafter: object) -> list[str]:
    return ["--model-path", str(target), "--speculative-draft-model-path", str(drafter)]


@on_cpu
def test_server_without_drafter(tmp_path):
    stderr = launch(tmp_path, *target_and_drafter(TARGET_DIR, "/no/such/drafter"))
    last = stderr.strip().splitlines()[-1]
    assert last.endswith(
        "ConfigError: --speculative-draft-model-path /no/such/drafter: there is no such checkpoint "
        "(no config.json in it)."
    )


@on_cpu
def test_server_with_wrong_hidden_size(tmp_path):
    stderr = launch(tmp_path, *target_and_drafter(TARGET_DIR, drafter_with(tmp_path, hidden_size=128)))
    last = stderr.strip().splitlines()[-1]
    assert "ConfigError: hidden_size=128 of drafter " in last and "which has hidden_size=256" in last


@on_cpu
def test_server_with_wrong_tensors(tmp_path):
    """Every wrong tensor is named, in one sentence."""
    tensors = {
        "fc.weight": torch.zeros(256, 512),
        "norm.weight": None,
        "layers.0.self_attn.q_proj.weight": torch.zeros(4, 256),
        "lm_head.weight": torch.zeros(2, 3),
    }
    drafter = checkpoint(DRAFTER_DIR, tmp_path / "drafter", tensors=tensors)
    stderr = launch(tmp_path, *target_and_drafter(TARGET_DIR, drafter))
    [error] = [line for line in stderr.splitlines() if "config.ConfigError: " in line]
    assert f"drafter {drafter} does not load: " in error
    for problem in (
        "fc.weight has shape [256, 512], expected [256, 768]",
        "layers.0.self_attn.q_proj.weight has shape [4, 256], expected [256, 256]",
        "unexpected lm_head.weight [2, 3]",
        "missing norm.weight [256]",
    ):
        assert problem in error


@on_cpu
def test_server_with_target_that_cannot_be_captured(tmp_path):
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "head_dim": None}
    target = checkpoint(TARGET_DIR, tmp_path / "target", config=config)
    stderr = launch(tmp_path, *target_and_drafter(target, DRAFTER_DIR), "--load-format", "dummy")
    [error] = [line for line in stderr.splitlines() if line.startswith("ValueError: ")]
    assert "Model Qwen2ForCausalLM implements neither" in error and "set_dflash_layers_to_capture" in error
