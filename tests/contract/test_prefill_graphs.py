"""CUDA graphs of prefills: one for each prefill where that has been tried, SGLang's default elsewhere."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from resolving import keep_environment, on_gpu, resolve
from sglang.srt.model_executor import cuda_graph_config
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig
from support import hybrid, targets
from support.gpus import GPUS

GRAPHS = {"sm_90": Backend.FULL} | {name: Backend.BREAKABLE for name in GPUS if name != "sm_90"}
MAIN_LINE = (
    "A prefill of up to 64 requests runs in one CUDA graph. SGLang's default is --cuda-graph-backend-prefill breakable."
)


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch):
    """SGLang's default on a machine with a CUDA GPU."""
    monkeypatch.setattr(cuda_graph_config, "default_prefill_backend", lambda: Backend.BREAKABLE)


def resolved(caplog, gpu: str = "sm_90", **flags) -> tuple[str, list[str]]:
    """Return the backend of graphs of prefills, and the log lines about it."""
    caplog.clear()
    with GPUS[gpu].resolving(), caplog.at_level(logging.INFO, logger="sglang_dflash"):
        args = resolve(**on_gpu(**flags))
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("sglang_dflash")]
    return args.cuda_graph_config.prefill.backend, [line for line in lines if "prefill" in line]


def reason(caplog, **flags) -> str:
    """Return with what one graph has not been tried."""
    backend, [line] = resolved(caplog, **flags)
    assert backend == Backend.BREAKABLE
    return line.removeprefix("Each prefill runs in many CUDA graphs, SGLang's default: one has not been tried ")


@pytest.mark.parametrize(
    ("flags", "num_requests"),
    [
        ({}, 64),
        ({"max_running_requests": 3}, 3),
        ({"max_running_requests": 300}, 64),
        ({"chunked_prefill_size": 512}, 64),
        ({"cuda_graph_config": {"prefill": {"full_prefill_max_req": 7}}}, 7),
    ],
    ids=str,
)
def test_requests_in_a_graph(flags, num_requests):
    with GPUS["sm_90"].resolving():
        args = resolve(**on_gpu(**flags))
    assert args.cuda_graph_config.prefill.backend == Backend.FULL
    assert args.cuda_graph_config.prefill.full_prefill_max_req == num_requests


@pytest.mark.parametrize("gpu", ["sm_80", "sm_89"])
def test_fa3_on_other_gpus(caplog, gpu):
    assert reason(caplog, gpu=gpu, attention_backend="fa3") == f"on {gpu}."


@pytest.mark.parametrize("gpu", GPUS)
def test_by_gpu(caplog, gpu):
    backend, [line] = resolved(caplog, gpu)
    assert backend == GRAPHS[gpu]
    assert (line == MAIN_LINE) == (backend == Backend.FULL)


@pytest.mark.parametrize(
    ("flags", "backend"),
    [
        ({"cuda_graph_backend_prefill": "breakable"}, Backend.BREAKABLE),
        ({"cuda_graph_backend_prefill": "full", "attention_backend": "triton"}, Backend.FULL),
        ({"cuda_graph_config": {"prefill": {"backend": "breakable"}}}, Backend.BREAKABLE),
        ({"cuda_graph_config": CudaGraphConfig(prefill=PhaseConfig(backend=Backend.FULL))}, Backend.FULL),
        # SGLang cannot tell it from its default.
        ({"cuda_graph_config": CudaGraphConfig(prefill=PhaseConfig(backend=Backend.BREAKABLE))}, Backend.BREAKABLE),
        ({"disable_prefill_cuda_graph": True}, Backend.DISABLED),
        # No sizes are captured.
        ({"chunked_prefill_size": -1}, Backend.BREAKABLE),
        ({"disable_cuda_graph": True}, Backend.DISABLED),
    ],
    ids=str,
)
def test_named_graphs_are_kept(caplog, flags, backend):
    assert resolved(caplog, **flags) == (backend, [])


@pytest.mark.parametrize("config", [{"prefill": {"max_bs": 512}}, {"decode": {"backend": "full"}}, {}], ids=str)
def test_other_settings_of_graphs_name_none(caplog, config):
    assert resolved(caplog, cuda_graph_config=config) == (Backend.FULL, [MAIN_LINE])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"attention_backend": "flashinfer"}, "on flashinfer."),
        ({"attention_backend": "fa3", "prefill_attention_backend": "triton"}, "on triton and fa3."),
        ({"tp_size": 2}, "with --tp-size."),
        ({"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["all"]}, "with --enable-lora."),
        ({"enable_hierarchical_cache": True}, "with --enable-hierarchical-cache."),
        ({"disaggregation_mode": "prefill"}, "with --disaggregation-mode."),
        ({"page_size": 64}, "with --page-size."),
        ({"kv_cache_dtype": "fp8_e4m3"}, "with --kv-cache-dtype."),
        ({"enable_mixed_chunk": True}, "with --enable-mixed-chunk."),
        ({"enable_memory_saver": True}, "with --enable-memory-saver."),
        ({"quantization": "fp8"}, "with a target that has quantized weights."),
    ],
    ids=str,
)
def test_untried_flags_keep_the_default(caplog, flags, expected):
    assert reason(caplog, **flags) == expected


@pytest.mark.parametrize("flags", [{"enable_deterministic_inference": True}, {"rl_on_policy_target": "fsdp"}], ids=str)
def test_deterministic_servers_keep_the_default(caplog, monkeypatch, flags):
    keep_environment(monkeypatch)
    assert reason(caplog, **flags) == "with --enable-deterministic-inference."


def write_pair(folder: Path, kind: str) -> dict:
    return targets.write_pair(folder, kind, "bfloat16") | {"speculative_draft_model_path": str(folder / "drafter")}


def test_windows_whose_kv_is_kept(caplog, tmp_path):
    pair = write_pair(tmp_path, "gpt_oss")
    assert reason(caplog, disable_hybrid_swa_memory=True, **pair) == "with a target that has sliding windows."


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", None),
        ("qwen3_moe", "experts"),
        ("qwen3_vl", "parts for images or sound"),
        ("gpt_oss", "sliding windows"),
        ("deepseek_v3", "latent attention"),
    ],
)
def test_by_target(caplog, tmp_path, kind, expected):
    pair = write_pair(tmp_path, kind)
    if expected is None:
        assert resolved(caplog, **pair) == (Backend.FULL, [MAIN_LINE])
    else:
        assert reason(caplog, **pair) == f"with a target that has {expected}."


def test_recurrent_target(caplog, tmp_path):
    hybrid.write_config(tmp_path / "target", "Qwen3_5ForCausalLM")
    drafter = str(hybrid.write_drafter(tmp_path / "drafter"))
    pair = {"model_path": str(tmp_path / "target"), "speculative_draft_model_path": drafter}
    assert reason(caplog, attention_backend="fa3", **pair) == "with a target that has recurrent layers."
