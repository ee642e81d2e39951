"""Layers of the package: a module imports its own layer and lower ones, and never in a circle."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "sglang_dflash"
# From the lowest to the highest. A name is a module, or all modules of a folder that have no line of their own.
LAYERS = (
    "version",
    "errors",
    "types",
    "checkpoint",
    "inspect",
    "ledger",
    "cpu_support",
    "hooks",
    "ops",
    "vocab",
    "recurrent",
    "server_args",
    "attention",
    "draft",
    "verify",
    "memory",
    "engine",
    "requests",
    "hook_table",
    "plugin",
    # Every hook, and the command line that records them.
    "ledger.hooked",
    "ledger.__main__",
)


def read_imports(package: Path) -> dict[str, set[str]]:
    """Return which modules of a package each of its modules imports, anywhere in its file."""
    paths = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: _imports_of(path, package.name, set(paths)) for name, path in paths.items()}


def _imports_of(path: Path, package: str, modules: set[str]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            if first == package and rest:
                # Of a module, or of something that it defines.
                module = rest if rest in modules else rest.rpartition(".")[0]
                assert module in modules, f"{path} imports {name}"
                found.add(module)
    # What a package itself defines, such as the version.
    return found - {""}


def layer_of(module: str) -> int:
    """Return the number of a module's layer, by the longest name that fits."""
    names = [name for name in LAYERS if module == name or module.startswith(f"{name}.")]
    assert names, f"{module} is in no layer of tests/unit/test_imports.py"
    return LAYERS.index(max(names, key=len))


def upward_imports(imports: dict[str, set[str]]) -> list[str]:
    return [
        f"{importer} imports {imported}"
        for importer, all_imported in sorted(imports.items())
        for imported in sorted(all_imported)
        if importer and layer_of(imported) > layer_of(importer)
    ]


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules of an import circle, the first one again at the end; empty: there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_a_higher_layer():
    assert upward_imports(read_imports(PACKAGE)) == []


def test_there_is_no_circle():
    assert circle(read_imports(PACKAGE)) == []


def test_every_layer_has_a_module():
    modules = read_imports(PACKAGE)
    assert [name for i, name in enumerate(LAYERS) if i not in {layer_of(module) for module in modules if module}] == []


@pytest.mark.parametrize(
    ("content", "upward", "has_circle"),
    [
        ("from sglang_dflash.types import Block", [], False),
        ("from sglang_dflash import verify", ["ops.add_norm imports verify"], False),
        (
            "def f():\n    from sglang_dflash.verify.sampler import FallbackSampler",
            ["ops.add_norm imports verify.sampler"],
            False,
        ),
        ("from sglang_dflash.ops import small_m_linear", [], True),
    ],
)
def test_what_is_noticed(tmp_path, content, upward, has_circle):
    files = {
        "__init__.py": "",
        "types.py": "",
        "verify/__init__.py": "",
        "verify/sampler.py": "from sglang_dflash import types",
        "ops/__init__.py": "",
        "ops/add_norm.py": content,
        "ops/small_m_linear.py": "from sglang_dflash.ops import add_norm",
    }
    for name, text in files.items():
        path = tmp_path / "sglang_dflash" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    imports = read_imports(tmp_path / "sglang_dflash")
    assert upward_imports(imports) == upward
    assert bool(circle(imports)) == has_circle
