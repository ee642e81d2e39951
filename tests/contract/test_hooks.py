"""A DFLASH server runs with every hook of this package in effect, on the SGLang it was made for, or not at all."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys

import pytest
import torch
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookType

from sglang_dflash import hooks
from sglang_dflash.cpu.hooks import CPU_HOOKS
from sglang_dflash.flashinfer_window import FLASHINFER_HOOKS
from sglang_dflash.integration import HOOKS
from sglang_dflash.plugin import CREATE_WORKER
from sglang_dflash.tiny_pair import DRAFTER_DIR, TARGET_DIR

load_plugins()

ON_CPU = not torch.cuda.is_available()
ALL_HOOKS = [*HOOKS, *(CPU_HOOKS if ON_CPU else FLASHINFER_HOOKS)]

# What a process of a server does first. `resolve(dflash=...)` completes the arguments of one server.
PRELUDE = f"""
import json, os, sys
from sglang.srt.plugins import load_plugins

def resolve(dflash):
    from sglang.srt.server_args import ServerArgs
    kwargs = {{"model_path": {str(TARGET_DIR)!r}}}
    if {ON_CPU}:
        kwargs |= {{"device": "cpu", "attention_backend": "torch_native", "dtype": "float32"}}
    if dflash:
        kwargs |= {{"speculative_algorithm": "DFLASH", "speculative_draft_model_path": {str(DRAFTER_DIR)!r}}}
    return ServerArgs(**kwargs)
"""


def run_python(body: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + body], env=os.environ | env, capture_output=True, text=True, timeout=180
    )


def last_json(run: subprocess.CompletedProcess) -> object:
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


# --- the manifest ---------------------------------------------------------------------------------------------------


def test_every_hook_is_in_effect():
    hooks.verify()
    assert [hook for hook in ALL_HOOKS if not hooks._is_bound(hook)] == []


@pytest.mark.parametrize("hook", ALL_HOOKS, ids=lambda hook: hook.target.rpartition("srt.")[2])
def test_every_hook_says_why_and_until_when(hook):
    assert hook.why and hook.until
    assert pkgutil.resolve_name(hook.target)


def test_hook_that_is_not_bound_is_found(monkeypatch):
    """Registered after SGLang applied its hooks, so it never takes."""
    late = hooks.Hook("sglang.srt.server_args.prepare_server_args", HookType.AROUND, lambda *args: None, "", "")
    gone = hooks.Hook("sglang.srt.no_such_module.function", HookType.AROUND, lambda *args: None, "", "")
    monkeypatch.setattr(hooks, "_registered", [*hooks._registered, late, gone])
    with pytest.raises(hooks.HookError) as caught:
        hooks.verify()
    assert str(caught.value).startswith(
        "sglang-dflash could not hook into SGLang at: sglang.srt.server_args.prepare_server_args, "
        "sglang.srt.no_such_module.function. Set SGLANG_PLUGINS=none "
    )


RENAME_EACH_IN_TURN = """
import dataclasses
from sglang_dflash import integration

results = {}
for index, hook in enumerate(integration.HOOKS):
    # A process for each, as hooks cannot be taken back; forked, as the imports take seconds.
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        integration.HOOKS[index] = dataclasses.replace(hook, target=hook.target + "_renamed")
        load_plugins()
        resolve(dflash=False)
        try:
            resolve(dflash=True)
            error = None
        except (RuntimeError, ValueError) as caught:
            error = [type(caught).__name__, str(caught)]
        os.write(write_end, json.dumps(error).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        results[hook.target + "_renamed"] = json.loads(pipe.read())
    os.waitpid(child, 0)
print(json.dumps(results))
"""


def test_missing_hook_stops_dflash_and_nothing_else():
    results = last_json(run_python(RENAME_EACH_IN_TURN))
    assert len(results) == len(HOOKS)
    for target, error in results.items():
        assert error is not None, f"DFLASH starts without {target}"
        kind, message = error
        assert kind == "HookError", message
        assert f"could not hook into SGLang at: {target}." in message


# --- versions -------------------------------------------------------------------------------------------------------

# As on an SGLang that this package was not made for.
OTHER_VERSION = """
import sglang_dflash.plugin
sglang_dflash.plugin.SUPPORTED_SGLANG = "0.4.2"
load_plugins()
"""


def test_other_version_refuses_dflash():
    run = run_python(OTHER_VERSION + "resolve(dflash=True)")
    assert run.returncode != 0
    last = run.stderr.strip().splitlines()[-1]
    assert "serves DFLASH on SGLang 0.4.2, and SGLang 0.5.17 is installed" in last
    assert "SGLANG_PLUGINS=none" in last


def test_other_version_refuses_the_worker_too():
    create = "from sglang.srt.speculative.spec_info import SpeculativeAlgorithm as A; A.DFLASH.create_worker(None)"
    run = run_python(OTHER_VERSION + create)
    assert run.returncode != 0
    assert "serves DFLASH on SGLang 0.4.2" in run.stderr.strip().splitlines()[-1]


def test_other_version_serves_everything_else():
    args = last_json(run_python(OTHER_VERSION + "print(json.dumps(resolve(dflash=False).speculative_algorithm))"))
    assert args is None


# As if the package did not fit the SGLang it finds: the plugin raises, and SGLang goes on without it.
BROKEN_PLUGIN = """
import sys
sys.modules["sglang_dflash.integration"] = None
load_plugins()
"""


def test_plugin_that_does_not_load_refuses_dflash_and_nothing_else():
    run = run_python(BROKEN_PLUGIN + "resolve(dflash=True)")
    assert run.returncode != 0
    assert "could not be loaded" in run.stderr.strip().splitlines()[-1]
    args = last_json(run_python(BROKEN_PLUGIN + "print(json.dumps(resolve(dflash=False).speculative_algorithm))"))
    assert args is None


def test_plugins_none_leaves_sglang_alone():
    """`SGLANG_PLUGINS=none` is how a user gets the in-tree worker back."""
    body = f"""
import pkgutil
load_plugins()
print(json.dumps(hasattr(pkgutil.resolve_name({CREATE_WORKER!r}), "__wrapped__")))
"""
    assert last_json(run_python(body, SGLANG_PLUGINS="none")) is False
    assert last_json(run_python(body)) is True
