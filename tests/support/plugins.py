"""The SGLang plugins of `tests/plugins`, installed for one server at a time through `PYTHONPATH`."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

from support.files import replace_file

_PLUGINS = Path(__file__).parents[1] / "plugins"


@cache
def _install(name: str) -> str:
    """Return a folder with the module of a plugin and the `.dist-info` that declares its entry point."""
    folder = Path(tempfile.gettempdir()) / f"sglang-dflash-test-plugins-{os.getuid()}" / name
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n"
    replace_file(info / "METADATA", metadata.encode())
    replace_file(info / "entry_points.txt", f"[sglang.srt.plugins]\n{name} = {name}:register\n".encode())
    replace_file(folder / f"{name}.py", (_PLUGINS / f"{name}.py").read_bytes())
    return str(folder)


def python_path(*names: str) -> str:
    """Return a `PYTHONPATH` with which SGLang loads these plugins, followed by the current `PYTHONPATH`."""
    return os.pathsep.join([*map(_install, names), *filter(None, [os.environ.get("PYTHONPATH")])])
