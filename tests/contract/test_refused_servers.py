"""`launch_server` of a DFLASH server that cannot serve correctly ends, and its last output says why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench.ports import claim_port
from resolving import ON_CPU, checkpoint, drafter_with
from safetensors.torch import load_file
from serving import ENV
from support import processes

from models.tiny import DRAFTER_DIR, TARGET_DIR


def launch(tmp_path: Path, *flags: str, spawn: bool = False) -> str:
    """Return what `launch_server` writes to stderr before it ends by itself with an error.

    One server that its main process refuses, and one that its scheduler refuses, are spawned as users' servers are.
    """
    port, claim = claim_port()
    arguments = ["-m", "sglang.launch_server", "--port", str(port), "--max-total-tokens", "4096"]
    arguments += ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"]
    with claim:
        status, _, stderr = processes.run(
            [*arguments, "--speculative-algorithm", "DFLASH", *flags], ENV, tmp_path, spawn=spawn
        )
    assert status != 0
    return stderr


on_cpu = pytest.mark.skipif(not ON_CPU, reason="serves on the CPU")


def target_and_drafter(target: object, drafter: object) -> list[str]:
    return ["--model-path", str(target), "--speculative-draft-model-path", str(drafter)]


@on_cpu
def test_server_without_drafter(tmp_path):
    stderr = launch(tmp_path, *target_and_drafter(TARGET_DIR, "/no/such/drafter"), spawn=True)
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
    """The loader names every wrong tensor in one sentence too, if no headers were read before."""
    tensors = {
        "fc.weight": torch.zeros(256, 512),
        "norm.weight": None,
        "layers.0.self_attn.q_proj.weight": torch.zeros(4, 256),
        "lm_head.weight": torch.zeros(2, 3),
    }
    drafter = checkpoint(DRAFTER_DIR, tmp_path / "drafter", tensors=tensors)
    safetensors = tmp_path / "drafter" / "model.safetensors"
    torch.save(load_file(safetensors), safetensors.with_name("pytorch_model.bin"))
    safetensors.unlink()
    stderr = launch(tmp_path, *target_and_drafter(TARGET_DIR, drafter), spawn=True)
    [error] = [line for line in stderr.splitlines() if "errors.ConfigError: " in line]
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
