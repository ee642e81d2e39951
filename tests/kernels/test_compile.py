"""Triton interprets what it would not compile, so kernels are compiled too, for a GPU that need not be there."""

import os
import re
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "compile_kernels.py"
SOURCES = Path(__file__).parents[2] / "sglang_dflash/kernels"


def test_every_kernel_compiles_for_hopper():
    path = os.pathsep.join([str(PROGRAM.parents[1] / "scripts"), *sys.path])
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path}
    run = subprocess.run([sys.executable, PROGRAM], env=env, capture_output=True, text=True, timeout=300)

    assert run.returncode == 0, run.stderr[-4000:]
    kernels = {
        name for source in SOURCES.glob("*.py") for name in re.findall(r"def (\w+_kernel)\(", source.read_text())
    }
    # Which moves nothing, and so is not among those that the benchmark measures.
    assert {line.split()[0] for line in run.stdout.splitlines()} == kernels - {"_read_clock_kernel"}
