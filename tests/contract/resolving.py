"""Resolution of a server's arguments in this process: SGLang's own `ServerArgs`, resolved as `launch_server` does.

No server is started.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.arg_groups.model_override_base import ResolvedView, resolved_view
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from models.tiny import DRAFTER_DIR, TARGET_DIR
from sglang_dflash.errors import ConfigError

load_plugins()

ON_CPU = not torch.cuda.is_available()
DEVICE_ARGS = {"device": "cpu", "attention_backend": "torch_native", "dtype": "float32"} if ON_CPU else {}
DFLASH_ARGS = {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(DRAFTER_DIR)}


def asked(**changes) -> ServerArgs:
    """Arguments of a user, and everything that SGLang makes of them."""
    args = ServerArgs(**{"model_path": str(TARGET_DIR)} | DEVICE_ARGS | DFLASH_ARGS | changes)
    args.resolve_once()
    return args


def resolve(**changes) -> ResolvedView:
    """Return every field of `ServerArgs` as resolved, which is what a server uses."""
    return resolved_view(asked(**changes))


def on_gpu(**changes) -> dict:
    """The README's command for a GPU, and what a test changes."""
    return {"device": "cuda", "attention_backend": None, "dtype": "bfloat16", "random_seed": 0} | changes


def keep_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo after the test what SGLang sets in the environment for a trainer's rounding."""
    for name in ("SGLANG_ENABLE_DETERMINISTIC_INFERENCE", "SGLANG_VLM_CACHE_SIZE_MB"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def refusal(**changes) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(**changes)
    message = str(caught.value)
    assert "\n" not in message
    return message


def checkpoint(source: Path, path: Path, config: dict | None = None, tensors: dict | None = None) -> str:
    """Copy one of the tiny pair's checkpoints, with changes.

    Args:
        config: fields that replace those of `config.json`; None removes a field.
        tensors: tensors that replace those of the same name; None removes a tensor.
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
