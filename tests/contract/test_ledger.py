"""The ledger lists everything of SGLang that the package builds on; `python -m sglang_dflash.ledger` compares it.

The tests read the package's source for what it replaces, subclasses, reads by a private name or changes.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
import pkgutil
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry

import sglang_dflash
import sglang_dflash_cpu
from sglang_dflash.ledger import __main__ as command_line
from sglang_dflash.ledger import recorded, state
from sglang_dflash.ledger.hooked import hooked
from sglang_dflash.ledger.source import Source
from sglang_dflash.ledger.uses import USES, manifest

load_plugins()

INSTALLED = Source.installed()
PACKAGE = Path(sglang_dflash.__file__).parent
CPU_PACKAGE = Path(sglang_dflash_cpu.__file__).parent
# Users are named by their path in the package; files of the CPU plugin with the name of theirs in front.
MODULES = {
    path.relative_to(folder): ast.parse(path.read_text())
    for package, folder in ((PACKAGE, PACKAGE), (CPU_PACKAGE, CPU_PACKAGE.parent))
    for path in sorted(package.rglob("*.py"))
}

# Private names and changed attributes of others: FlashInfer's wrappers, transformers' configs and caches, tokenizers,
# torch, named tuples.
FLASHINFERS = {"_plan_info", "_int_workspace_buffer", "_float_workspace_buffer", "_pin_memory_int_workspace_buffer"}
FLASHINFERS |= {"_cached_module", "run"}
FOREIGN = FLASHINFERS | {"_name_or_path", "quantization_config", "pre_tokenizer", "decoder"}
FOREIGN |= {"_reorder_linear_weight", "_linear_pointwise", "_replace", "keys", "values"}
# Attributes of a class of ours that extends one of SGLang's.
FOREIGN |= {"trees"}


# --- what is recorded -----------------------------------------------------------------------------------------------


def test_manifest_is_recorded():
    """The record is up to date. Otherwise run `python -m sglang_dflash.ledger --write`."""
    assert set(recorded.FINGERPRINTS) == set(manifest(hooked()))
    assert tuple((use.user, use.why, *use.symbols) for use in hooked()) == recorded.HOOKED


def test_installed_sglang_is_the_recorded_one():
    assert importlib.metadata.version("sglang") == recorded.SGLANG
    assert {symbol: INSTALLED.fingerprint(symbol) for symbol in recorded.FINGERPRINTS} == recorded.FINGERPRINTS
    assert {path: INSTALLED.digest(path) for path in recorded.FILES} == recorded.FILES
    assert {INSTALLED.locate(symbol)[0] for symbol in recorded.FINGERPRINTS} == set(recorded.FILES)


@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.user}: {use.why}")
def test_every_entry_names_a_file_of_ours_and_says_why(use):
    assert Path(use.user) in MODULES
    assert use.why
    assert len(set(use.symbols)) == len(use.symbols) > 0


# --- what has to be recorded ----------------------------------------------------------------------------------------


def is_recorded(symbol: str) -> bool:
    return symbol in recorded.FINGERPRINTS


def knows(name: str) -> bool:
    """Return whether the ledger has an attribute of that name, or a class whose methods define or assign it."""
    return any(symbol.endswith(f".{name}") for symbol in recorded.FINGERPRINTS) or any(
        INSTALLED.fingerprint(f"{symbol}.{name}") is not None for symbol in recorded.FINGERPRINTS if is_class(symbol)
    )


@cache
def is_class(symbol: str) -> bool:
    return any(line.startswith(f"class {symbol.rpartition('.')[2]}") for line in INSTALLED.text(symbol))


def knows_private(name: str) -> bool:
    """Return whether the ledger has an attribute, also one that SGLang assigns outside of the object's class."""
    return knows(name) or any(name in line for symbol in recorded.FINGERPRINTS for line in INSTALLED.text(symbol))


def imported(module: ast.Module) -> dict[str, str]:
    """Return the dotted paths of what a module of ours imports from SGLang, by local name."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("sglang.")
        for alias in node.names
    }


def attributes(module: ast.Module) -> Iterator[ast.Attribute]:
    """Yield the attributes of all objects but `self` and `cls`."""
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        ):
            yield node


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_every_hook_is_in_the_ledger():
    """Hooks that are registered outside of the lists of hooks count too."""
    ours = [
        target
        for target, hooks in HookRegistry._hooks.items()
        if any(hook.__module__.startswith(("sglang_dflash.", "sglang_dflash_cpu.")) for _, hook, _ in hooks)
    ]
    assert len(ours) > 20
    for target in ours:
        if target.startswith("sglang.") and not is_recorded(target):
            function = inspect.unwrap(pkgutil.resolve_name(target))
            assert is_recorded(f"{function.__module__}.{function.__qualname__}"), target


def test_every_base_class_is_in_the_ledger():
    found = 0
    for path, module in MODULES.items():
        names = imported(module)
        for node in ast.walk(module):
            for base in node.bases if isinstance(node, ast.ClassDef) else ():
                first, _, rest = ast.unparse(base).partition(".")
                if first not in names:
                    continue
                found += 1
                for each in pkgutil.resolve_name(f"{names[first]}.{rest}".rstrip(".")).__mro__:
                    if each.__module__.startswith("sglang."):
                        assert is_recorded(f"{each.__module__}.{each.__qualname__}"), (str(path), node.name)
    assert found > 5


def test_every_private_name_is_in_the_ledger():
    found = 0
    for path, module in MODULES.items():
        for name, symbol in imported(module).items():
            if is_private(symbol.rpartition(".")[2]):
                assert is_recorded(symbol), (str(path), name)
        own = {node.name for node in ast.walk(module) if isinstance(node, ast.FunctionDef)}
        for node in attributes(module):
            if is_private(node.attr) and node.attr not in own | FOREIGN:
                found += 1
                assert knows_private(node.attr), f"{path}:{node.lineno} {node.attr}"
    assert found > 5


def test_every_private_name_that_is_inherited_is_in_the_ledger():
    """The names are `self._name` in our classes, defined by SGLang's base class."""
    own = set()
    for module in MODULES.values():
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef):
                own.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                own.add(node.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
    inherited = {
        node.attr
        for module in MODULES.values()
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | FOREIGN
    }
    assert "_make_graph_key" in inherited
    assert [name for name in inherited if not knows(name)] == []


def test_everything_that_is_changed_is_in_the_ledger():
    found = 0
    for path, module in MODULES.items():
        names = imported(module)
        for node in attributes(module):
            if isinstance(node.ctx, ast.Store) and node.attr not in FOREIGN:
                found += 1
                known = knows_private(node.attr) if is_private(node.attr) else knows(node.attr)
                assert known, f"{path}:{node.lineno} {node.attr}"
        for node in ast.walk(module):
            # A registry of SGLang's.
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                root, _, attribute = ast.unparse(node.value).partition(".")
                assert root not in names or knows(attribute), f"{path}:{node.lineno} {ast.unparse(node)}"
    assert found > 20


# --- the command line -----------------------------------------------------------------------------------------------

CHANGED = "sglang.srt.managers.scheduler.Scheduler._forward_isolation"
CHANGE = "def _forward_isolation(self, batch: ScheduleBatch, *, overlap: bool)", "def _forward_isolation(self, batch)"
MOVED = "sglang.srt.mem_cache.allocation.alloc_for_spec_decode"
RENAME = "def alloc_for_spec_decode(", "def alloc_for_decode_of_blocks("


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return the files of the installed SGLang that the ledger covers, as a source that may be changed."""
    root = tmp_path / "sglang-next"
    for path in recorded.FILES:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(INSTALLED.where).parent / path, root / path)
    (root / "sglang-0.9.9.dist-info").mkdir()
    (root / "sglang-0.9.9.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.9.9\n")
    return root


@pytest.fixture
def changed_tree(tree: Path) -> Path:
    edit(tree / "sglang/srt/managers/scheduler.py", *CHANGE)
    edit(tree / "sglang/srt/mem_cache/allocation.py", *RENAME)
    (tree / "sglang/srt/mem_cache/allocation_blocks.py").write_text("def alloc_for_spec_decode(): pass\n")
    return tree


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def wheel(tree: Path, path: Path, name: str = "sglang") -> str:
    with zipfile.ZipFile(path, "w") as archive:
        for file in tree.rglob("*"):
            if file.is_file():
                archive.write(file, file.relative_to(tree))
    if name != "sglang":
        metadata = f"{name}-1.0.dist-info/METADATA"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(metadata, f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    return str(path)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = command_line.main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def test_installed_sglang_is_the_same(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    assert out.splitlines()[-1].endswith(f"{len(recorded.FINGERPRINTS)} same.")
    assert len(out.splitlines()) == 1
    assert len(run(capsys, "--all")[1].splitlines()) > 2 * len(recorded.FINGERPRINTS)


def test_it_runs_without_sglang():
    """The first step of a port runs on a machine with a wheel and without SGLang."""
    code = f"""
import sys
sys.modules["sglang"] = sys.modules["torch"] = None
sys.path.insert(0, {str(PACKAGE.parent)!r})
from sglang_dflash.ledger.__main__ import main
sys.exit(main([{INSTALLED.where!r}]))
"""
    subprocess.run([sys.executable, "-I", "-c", code], check=True, timeout=180)


def test_another_version_with_the_same_source_is_the_same(capsys, tree):
    """Other comments do not count, which only parsing can show."""
    scheduler = tree / "sglang/srt/managers/scheduler.py"
    scheduler.write_text("# A comment.\n" + scheduler.read_text())
    for path in (str(tree), str(tree / "sglang"), wheel(tree, tree.parent / "sglang-0.9.9-py3-none-any.whl")):
        code, out, _ = run(capsys, path)
        assert code == 0, out
        assert f"SGLang 0.9.9 ({path}) against {recorded.SGLANG}" in out


def test_differences_are_named_with_who_uses_them_and_why(capsys, changed_tree):
    for path in (str(changed_tree), wheel(changed_tree, changed_tree.parent / "next.whl")):
        code, out, _ = run(capsys, path)
        assert code == 1
        relayed = "relies on who restores the batch that a cycle overwrites, and on when results are relayed"
        assert out.splitlines()[:-1] == [
            f"changed {CHANGED}",
            f"        engine/worker.py: {relayed}",
            f"missing {MOVED}",
            "        memory/reservation.py: reserves KV slots of a block as SGLang counts them",
            "        sglang/srt/mem_cache/allocation_blocks.py defines something of its last name",
        ]
        assert out.splitlines()[-1].endswith(f"{len(recorded.FINGERPRINTS) - 2} same, 1 changed, 1 missing.")


def test_differences_as_json(capsys, changed_tree):
    code, out, _ = run(capsys, str(changed_tree), "--json")
    report = json.loads(out)
    assert code == 1
    assert report["written_against"] == recorded.SGLANG
    assert report["compared"] == {"path": str(changed_tree), "version": "0.9.9"}
    assert set(report["symbols"]) == set(recorded.FINGERPRINTS)
    assert report["symbols"][CHANGED]["state"] == "changed"
    assert "engine/worker.py" in report["symbols"][CHANGED]["used_by"]
    assert report["symbols"][MOVED]["state"] == "missing"
    assert report["symbols"][MOVED]["same_name_in"] == ["sglang/srt/mem_cache/allocation_blocks.py"]
    assert {entry["state"] for entry in report["symbols"].values()} == {"same", "changed", "missing"}


def test_diff_of_what_has_changed(capsys, changed_tree):
    code, out, _ = run(capsys, str(changed_tree), "--diff")
    assert code == 1
    lines = [line.strip() for line in out.splitlines()]
    old, new = CHANGE
    assert [line for line in lines if line.startswith(("+", "-"))] == [
        f"--- {recorded.SGLANG}",
        "+++ 0.9.9",
        f"-    {old}:",
        f"+    {new}:",
    ]
    # The other direction, as after the installation of a new SGLang.
    assert run(capsys, str(changed_tree), "--diff", "--base", INSTALLED.where) == (code, out, "")


def test_diff_starts_from_what_is_recorded(capsys, changed_tree):
    code, _, err = run(capsys, str(changed_tree), "--diff", "--base", str(changed_tree))
    assert code == 2
    assert f"give --base the source of {recorded.SGLANG}" in err


def test_what_is_new_in_the_manifest_is_a_difference(capsys, monkeypatch, tree):
    monkeypatch.setattr(recorded, "FINGERPRINTS", {k: v for k, v in recorded.FINGERPRINTS.items() if k != CHANGED})
    code, out, _ = run(capsys, str(tree))
    assert code == 1
    assert out.startswith(f"new     {CHANGED}\n")


def test_write_records_a_port(capsys, monkeypatch, changed_tree, tmp_path):
    file = tmp_path / "recorded.py"
    monkeypatch.setattr(recorded, "__file__", str(file))
    code, out, _ = run(capsys, str(changed_tree), "--write")
    assert code == 1
    assert f"missing {MOVED}" in out
    assert not file.exists()

    edit(changed_tree / "sglang/srt/mem_cache/allocation.py", *reversed(RENAME))
    assert run(capsys, str(changed_tree), "--write")[0] == 0
    written = {}
    exec(file.read_text(), written)
    assert written["SGLANG"] == "0.9.9"
    assert written["HOOKED"] == recorded.HOOKED
    differing = {
        symbol for symbol in recorded.FINGERPRINTS if written["FINGERPRINTS"][symbol] != recorded.FINGERPRINTS[symbol]
    }
    assert differing == {CHANGED}
    for name in ("FILES", "FINGERPRINTS"):
        monkeypatch.setattr(recorded, name, written[name])
    assert state(Source.at(str(changed_tree)), CHANGED) == "same"
    assert state(INSTALLED, CHANGED) == "changed"


def test_bad_input_is_one_error(capsys, tree, tmp_path):
    not_zipped = tmp_path / "sglang-0.9.9-py3-none-any.whl"
    not_zipped.write_text("no wheel")
    bare = tmp_path / "bare.zip"
    with zipfile.ZipFile(bare, "w") as archive:
        archive.writestr("sglang/srt/server_args.py", "")
    for path, error in {
        "no/such/file.whl": "no/such/file.whl does not exist",
        str(not_zipped): f"{not_zipped} is neither a wheel nor a directory",
        str(bare): f"{bare} is not a wheel: it has no .dist-info/METADATA",
        wheel(tree, tmp_path / "other.whl", name="other"): f"{tmp_path}/other.whl is a wheel of other, not of sglang",
        str(tmp_path): f"{tmp_path} is not the source of SGLang: it has no sglang/srt",
    }.items():
        assert run(capsys, path) == (2, "", f"python -m sglang_dflash.ledger: {error}\n")
    edit(tree / "sglang/srt/managers/scheduler.py", CHANGE[0], "def _forward_isolation(self, self=)")
    code, out, err = run(capsys, str(tree))
    assert (code, out) == (2, "")
    assert "sglang/srt/managers/scheduler.py" in err
