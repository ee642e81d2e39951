"""A DFLASH server runs with every hook in effect, on the SGLang that the package was made for, or not at all."""

from __future__ import annotations

import inspect
import json
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from serving import ENV
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.utils.common import is_flashinfer_available
from support import processes

from models.tiny import DRAFTER_DIR, TARGET_DIR
from sglang_dflash import hooks
from sglang_dflash.attention.flashinfer_window import FLASHINFER_HOOKS
from sglang_dflash.hook_table import FA3_HOOKS, HOOKS
from sglang_dflash.hooks import CREATE_WORKER, RESOLVE_ARGUMENTS
from sglang_dflash.ledger import recorded
from sglang_dflash.plugin import GUARDED
from sglang_dflash_cpu.hooks import CPU_HOOKS

load_plugins()

TESTS = Path(__file__).parents[1]
ON_CPU = not torch.cuda.is_available()
ALL_HOOKS = [*HOOKS, *(CPU_HOOKS if ON_CPU else FA3_HOOKS), *(FLASHINFER_HOOKS if is_flashinfer_available() else [])]
# Without a GPU, FA3's hooks are registered over a replacement of FA3, in processes that ask for it.
LOSABLE = [*ALL_HOOKS, *(FA3_HOOKS if ON_CPU else [])]

# What a process of a server does first. `resolve(dflash=...)` completes the arguments of one server; `lose` has hooks
# registered where nothing is, as if SGLang had moved what they are for; `in_turn` calls a function with each argument,
# in processes of their own, as hooks cannot be taken back, and returns what each of them raised.
PRELUDE = f"""
import json, os, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry

def arguments(dflash):
    from sglang.srt.server_args import ServerArgs
    kwargs = {{"model_path": {str(TARGET_DIR)!r}}}
    if {ON_CPU}:
        kwargs |= {{"device": "cpu", "attention_backend": "torch_native", "dtype": "float32"}}
    if dflash:
        kwargs |= {{"speculative_algorithm": "DFLASH", "speculative_draft_model_path": {str(DRAFTER_DIR)!r}}}
    return ServerArgs(**kwargs)

def resolve(dflash):
    args = arguments(dflash)
    args.resolve_once()
    return args

def lose(*targets):
    register = HookRegistry.register
    HookRegistry.register = lambda target, *rest: register(target + "_moved" if target in targets else target, *rest)

def in_turn(function, arguments):
    errors = {{}}
    for argument in arguments:
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                function(argument)
                error = None
            except (RuntimeError, ValueError) as caught:
                error = [type(caught).__name__, str(caught)]
            os.write(write_end, json.dumps(error).encode())
            os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end) as pipe:
            errors[argument] = json.loads(pipe.read())
        os.waitpid(child, 0)
    return errors
"""


@pytest.fixture
def run_python(tmp_path):
    """Return a function that runs code after `PRELUDE`, and returns its exit status, stdout and stderr.

    With `spawn`, the code imports what it needs before and after plugins are loaded. Otherwise SGLang was imported
    before.
    """

    def run(body: str, spawn: bool = False, **env: str) -> tuple[int, str, str]:
        return processes.run(["-c", PRELUDE + body], ENV | env, tmp_path, spawn=spawn)

    return run


def last_json(run: tuple[int, str, str]) -> object:
    status, stdout, stderr = run
    assert status == 0, stderr[-4000:]
    return json.loads(stdout.splitlines()[-1])


def last_line(stderr: str) -> str:
    return stderr.strip().splitlines()[-1]


# --- the hook table -------------------------------------------------------------------------------------------------


def test_every_hook_is_in_effect():
    hooks.verify()
    assert [hook for hook in ALL_HOOKS if not hooks._is_bound(hook)] == []


def test_no_module_has_a_name_for_a_hooked_method():
    """So SGLang need not search them for one, see `hooks.skip_search_for_methods`."""
    originals = {}
    for hook in ALL_HOOKS:
        owner, name = hook.target.rsplit(".", 1)
        if isinstance(pkgutil.resolve_name(owner), type):
            originals[id(inspect.unwrap(pkgutil.resolve_name(hook.target)))] = name
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    named = [
        originals[id(value)] for module in modules for value in list(vars(module).values()) if id(value) in originals
    ]
    assert originals and not named


def test_modules_are_searched_for_functions_alone(run_python):
    run = run_python("""
from sglang.srt.plugins import hook_registry
search, owners = hook_registry._propagate_patch, []
def note(original, wrapped, owner):
    owners.append(owner)
    return search(original, wrapped, owner)
hook_registry._propagate_patch = note
load_plugins()
print(json.dumps([isinstance(owner, type) for owner in owners]))
""")
    searched_for_methods = last_json(run)
    assert searched_for_methods and not any(searched_for_methods)


@pytest.mark.parametrize("hook", LOSABLE, ids=lambda hook: hook.target.rpartition("srt.")[2])
def test_every_hook_says_why_and_until_when(hook):
    assert hook.why and hook.until


@pytest.mark.parametrize("hook", ALL_HOOKS, ids=lambda hook: hook.target)
def test_every_hook_takes_what_is_passed_by_name(hook):
    """Callers pass arguments by name, also where DFLASH is not served."""
    function = list(inspect.signature(hook.function).parameters.values())
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in function):
        return
    # Arguments that SGLang passes before the function's own: the wrapped function, or its result.
    names = [parameter.name for parameter in function][hook.kind in (HookType.AROUND, HookType.AFTER) :]
    expected = list(inspect.signature(pkgutil.resolve_name(hook.target)).parameters)
    if hook.kind is HookType.REPLACE:
        # A replacement must not get arguments that it does not know; such a call fails.
        expected = expected[: len(names)]
    # The first argument of a method is never passed by name.
    is_method = expected[:1] == ["self"]
    assert names[is_method:] == expected[is_method:]


def test_hook_that_is_not_bound_is_found(monkeypatch):
    """The hook is registered after SGLang has applied all hooks, so it has no effect."""
    late = hooks.Hook("sglang.srt.server_args.prepare_server_args", HookType.AROUND, lambda *args: None, "", "")
    gone = hooks.Hook("sglang.srt.no_such_module.function", HookType.AROUND, lambda *args: None, "", "")
    monkeypatch.setattr(hooks, "_registered", [*hooks._registered, late, gone])
    with pytest.raises(hooks.HookError) as caught:
        hooks.verify()
    assert str(caught.value).startswith(
        "sglang-dflash could not hook into SGLang at: sglang.srt.server_args.prepare_server_args, "
        "sglang.srt.no_such_module.function. Set SGLANG_PLUGINS=none "
    )


# SGLang takes a minute to apply hooks, so most hooks are lost together. Hooks that check the others are lost alone too.
LOST_AT_ONCE = {
    "nothing": [],
    "where arguments are resolved": [RESOLVE_ARGUMENTS],
    "where the worker is made": [CREATE_WORKER],
    "all": sorted({hook.target for hook in LOSABLE}),
}
LOSE_IN_TURN = f"""
# Imported here, as it takes seconds.
from sglang_dflash import hook_table

if {ON_CPU}:
    sys.path.insert(0, {str(TESTS)!r})
    from support import fa3_stand_in
    fa3_stand_in.provide()
    hook_table.is_cuda = lambda: True

lost = {LOST_AT_ONCE!r}

def start(name):
    lose(*lost[name])
    load_plugins()
    resolve(dflash=False)
    resolve(dflash=True)

print(json.dumps(in_turn(start, lost)))
"""


def test_missing_hooks_stop_dflash_and_nothing_else(run_python):
    errors = last_json(run_python(LOSE_IN_TURN, spawn=True))
    assert errors.pop("nothing") is None
    for name, error in errors.items():
        assert error is not None, f"DFLASH starts without its hooks {name}"
        kind, message = error
        assert kind == "HookError", message
        named = message.partition("could not hook into SGLang at: ")[2].partition(". Set ")[0]
        assert sorted(named.split(", ")) == sorted(LOST_AT_ONCE[name])


@pytest.mark.skipif(not ON_CPU, reason="of a machine without a GPU")
def test_missing_cpu_plugin_stops_dflash_and_nothing_else(run_python):
    body = "load_plugins()\nresolve(dflash=False)\nprint(1)\nresolve(dflash=True)"
    _, stdout, stderr = run_python(body, spawn=True, SGLANG_PLUGINS="dflash")
    assert stdout.splitlines()[-1] == "1", stderr[-4000:]
    assert "HookError: SGLang has not loaded the plugin dflash_cpu" in last_line(stderr)


# --- another SGLang -------------------------------------------------------------------------------------------------

# The recorded source has another function, and one that SGLang does not have.
OTHER_SOURCE = f"""
from sglang_dflash.ledger import recorded
recorded.SGLANG = "0.4.2"
recorded.FILES.clear()
recorded.FINGERPRINTS |= {{{CREATE_WORKER!r}: "another", "sglang.srt.gone.function": "any"}}
"""
ASK_IN_TURN = """
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

load_plugins()
asking = {
    "others": lambda: resolve(dflash=False),
    "arguments": lambda: resolve(dflash=True),
    "worker": lambda: SpeculativeAlgorithm.DFLASH.create_worker(None),
    "scheduler": lambda: Scheduler(arguments(dflash=True), None),
}
print(json.dumps(in_turn(lambda name: asking[name](), asking)))
"""


def test_other_source_refuses_dflash_and_nothing_else(run_python):
    errors = last_json(run_python(OTHER_SOURCE + ASK_IN_TURN))
    assert errors.pop("others") is None
    assert len(errors) == 3
    for kind, message in errors.values():
        assert kind == "LedgerError"
        assert f"was written against SGLang 0.4.2, and SGLang {recorded.SGLANG} is installed" in message
        assert f"changed: {CREATE_WORKER}; missing: sglang.srt.gone.function." in message
        assert "python -m sglang_dflash.ledger" in message
        assert "SGLANG_PLUGINS=none" in message


def test_other_version_with_the_same_source_serves_dflash(run_python):
    """Servers without DFLASH do not compare the source."""
    body = """
load_plugins()
resolve(dflash=False)
assert "sglang_dflash.ledger.recorded" not in sys.modules
from sglang_dflash.ledger import recorded
recorded.SGLANG = "0.4.2"
print(json.dumps(resolve(dflash=True).speculative_algorithm))
"""
    assert last_json(run_python(body)) == "DFLASH"


# The package does not fit this SGLang: the plugin raises an error, and SGLang continues without it.
BROKEN_PLUGIN = """
sys.modules["sglang_dflash.hook_table"] = None
load_plugins()
"""


def test_plugin_that_does_not_load_says_what_differs(run_python):
    _, _, stderr = run_python(OTHER_SOURCE + BROKEN_PLUGIN + "resolve(dflash=True)")
    assert f"changed: {CREATE_WORKER}; missing: sglang.srt.gone.function." in last_line(stderr)


KEEP_EACH_IN_TURN = f"""
import sglang.srt.managers.scheduler
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

TARGETS = {(CREATE_WORKER, RESOLVE_ARGUMENTS, *GUARDED)!r}

def start(target):
    sys.modules["sglang_dflash.hook_table"] = None
    lose(*(each for each in TARGETS if each != target))
    load_plugins()
    resolve(dflash=False)
    if target == {CREATE_WORKER!r}:
        SpeculativeAlgorithm.DFLASH.create_worker(None)
    elif target.endswith("Scheduler.__init__"):
        sglang.srt.managers.scheduler.Scheduler(arguments(dflash=True), None)
    else:
        resolve(dflash=True)

print(json.dumps(in_turn(start, TARGETS)))
"""


def test_plugin_that_does_not_load_refuses_dflash_in_each_place_and_nothing_else(run_python):
    errors = last_json(run_python(KEEP_EACH_IN_TURN))
    assert len(errors) == 4
    for target, error in errors.items():
        assert error is not None, f"{target} lets DFLASH pass"
        assert "could not be loaded" in error[1], target


def test_scheduler_that_nothing_else_has_checked(run_python):
    """The scheduler refuses even if all hooks into arguments and the worker are lost."""
    lost = (CREATE_WORKER, RESOLVE_ARGUMENTS, GUARDED[0], "sglang.srt.arg_groups.speculative_hook._handle_dflash")
    start = "from sglang.srt.managers.scheduler import Scheduler; Scheduler(arguments(dflash=True), None)"
    _, _, stderr = run_python(f"lose(*{lost})\nload_plugins()\n{start}")
    assert "HookError: sglang-dflash could not hook into SGLang at: " in last_line(stderr)
    assert CREATE_WORKER in last_line(stderr)


def test_plugins_none_leaves_sglang_alone(run_python):
    """`SGLANG_PLUGINS=none` lets users serve with the in-tree worker."""
    body = f"""
import pkgutil
load_plugins()
print(json.dumps(hasattr(pkgutil.resolve_name({CREATE_WORKER!r}), "__wrapped__")))
"""
    assert last_json(run_python(body, spawn=True, SGLANG_PLUGINS="none")) is False
    assert hasattr(pkgutil.resolve_name(CREATE_WORKER), "__wrapped__")
