"""`python -m sglang_dflash.inspect` describes a pair, and finds every mismatch before anything is loaded."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.tiny import DRAFTER_DIR, TARGET_DIR
from sglang_dflash.checkpoint.tensors import read_headers
from sglang_dflash.inspect import main


def copy_with(source, path, config=None, tensors=None):
    """Copy a checkpoint with some fields and tensors replaced; None removes one."""
    shutil.copytree(source, path)
    fields = json.loads((source / "config.json").read_text()) | (config or {})
    (path / "config.json").write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    kept = load_file(source / "model.safetensors") | (tensors or {})
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, path / "model.safetensors")
    return path


def inspect(capsys, target, drafter):
    """Return the exit code and the JSON object."""
    status = main([str(target), str(drafter), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_tiny_pair(capsys):
    status, found = inspect(capsys, TARGET_DIR, DRAFTER_DIR)
    assert status == 0 and found["mismatches"] == []
    # Keys and values of 3 layers with 2 heads of 64, in bfloat16.
    assert found["kv_bytes_per_token"] == 2 * 3 * 2 * 64 * 2
    # 15 drafts of 16 candidates.
    assert found["cycle_bytes_per_request"] == {"table": 15 * 16 * (16 * 5 + 12), "pairs": 0, "convolutions": 0}
    drafter = found["drafter"]
    assert drafter["layers"] == [
        {"window": 64, "causal": True},
        {"window": 64, "causal": True},
        {"window": None, "causal": False},
    ]
    assert (drafter["block_size"], drafter["mask_token_id"], drafter["target_layer_ids"]) == (16, 1, [0, 1, 2])


def test_text(capsys):
    assert main([str(TARGET_DIR), str(DRAFTER_DIR)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "format z-lab",
        "block size 16",
        "vocabulary 1024 tokens; mask token 1",
        "target layers 0, 1, 2 (their outputs, from 0)",
        "0 sliding 64, causal",
        "2 full, bidirectional",
        "KV per token 1536 bytes in bfloat16, 768 in fp8",
        "cycle memory per request, in bytes: table 22080",
        "mismatches none",
    ):
        assert line in lines


def test_every_mismatch_is_found(capsys, tmp_path):
    target = copy_with(TARGET_DIR, tmp_path / "target", {"hidden_size": 128, "vocab_size": 512, "num_hidden_layers": 3})
    tensors = {
        "fc.weight": torch.zeros(256, 512),
        "norm.weight": None,
        "lm_head.weight": torch.zeros(2, 3),
    }
    drafter = copy_with(DRAFTER_DIR, tmp_path / "drafter", tensors=tensors)
    status, found = inspect(capsys, target, drafter)
    assert status == 1
    for mismatch, named in zip(
        found["mismatches"],
        [
            "hidden_size=256",
            "vocab_size=1024",
            "num_target_layers=4",
            "target_layer_ids=[0, 1, 2]",
            "fc.weight has shape [256, 512], expected [256, 768]",
            "unexpected lm_head.weight [2, 3]",
            "missing norm.weight [256]",
        ],
        strict=True,
    ):
        assert named in mismatch and str(drafter) in mismatch


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"block_size": 1}, "block_size=1"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"architectures": ["DominoDraftModel"]}, "a checkpoint of Domino "),
        ({"dflash_config": None}, "is not a DFlash checkpoint"),
        ({"rope_theta": float("nan")}, "rope_theta=nan"),
        ({"dtype": "x"}, "dtype='x'"),
    ],
)
def test_config_that_cannot_be_understood(capsys, tmp_path, config, named):
    drafter = copy_with(DRAFTER_DIR, tmp_path / "drafter", config)
    status, found = inspect(capsys, TARGET_DIR, drafter)
    assert status == 1 and found["drafter"] is None
    [mismatch] = found["mismatches"]
    assert named in mismatch and "\n" not in mismatch


def test_recurrent_target(capsys, tmp_path):
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    target = copy_with(TARGET_DIR, tmp_path / "target", {"layer_types": kinds})
    _, found = inspect(capsys, target, DRAFTER_DIR)
    [mismatch] = found["mismatches"]
    assert "recurrent layers" in mismatch


def test_multimodal_target(capsys, tmp_path):
    text = json.loads((TARGET_DIR / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["SomeVLModel"], "text_config": text}))
    assert inspect(capsys, tmp_path, DRAFTER_DIR)[0] == 0


def test_files_beside_an_index_are_not_loaded(capsys, tmp_path):
    drafter = copy_with(DRAFTER_DIR, tmp_path / "drafter")
    shutil.copy(TARGET_DIR / "model.safetensors", drafter / "old.safetensors")
    names = [tensor.name for tensor in read_headers(str(DRAFTER_DIR))]
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (drafter / "model.safetensors.index.json").write_text(json.dumps(index))
    assert inspect(capsys, TARGET_DIR, drafter)[0] == 0

    (drafter / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "none.safetensors"}}))
    [mismatch] = inspect(capsys, TARGET_DIR, drafter)[1]["mismatches"]
    assert "none.safetensors" in mismatch


@pytest.mark.parametrize("path", ["/no/such/folder", "models/tiny/no", "~/target of mine", "models/no"])
def test_missing_folder(capsys, path):
    """The Hugging Face hub's rules for names are not what the user needs."""
    status, found = inspect(capsys, path, DRAFTER_DIR)
    [mismatch] = found["mismatches"]
    assert status == 1 and mismatch.startswith(f"TARGET {path} cannot be read: there is no such folder, and ")
    assert "Repo id" not in mismatch


@pytest.mark.parametrize("damage", ["no tensors", "no header", "no config", "no target"])
def test_checkpoint_that_cannot_be_read(capsys, tmp_path, damage):
    drafter, target = copy_with(DRAFTER_DIR, tmp_path / "drafter"), TARGET_DIR
    if damage == "no tensors":
        (drafter / "model.safetensors").unlink()
    elif damage == "no header":
        (drafter / "model.safetensors").write_bytes(b"{}")
    elif damage == "no config":
        (drafter / "config.json").unlink()
    else:
        target = tmp_path
    status, found = inspect(capsys, target, drafter)
    assert status == 1
    [mismatch] = found["mismatches"]
    assert str(tmp_path) in mismatch


def test_program_starts_nothing_of_sglang():
    """The program runs as users run it, and neither imports nor needs SGLang."""
    program = "import runpy, sys; sys.modules['sglang'] = None; "
    program += "runpy.run_module('sglang_dflash.inspect', run_name='__main__')"
    run = subprocess.run(
        [sys.executable, "-c", program, TARGET_DIR, DRAFTER_DIR],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert "mismatches       none" in run.stdout
