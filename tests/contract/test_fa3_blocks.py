"""SGLang's FA3 backend with its metadata and slots, under this package's hook, with a replacement of FA3 itself.

`tests/gpu/test_masks.py` runs FA3 too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.plugins import python_path

SCRIPT = Path(__file__).parents[1] / "support" / "masks.py"
CPU = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_masks.py does the same with FA3")
def test_masks(tmp_path):
    """Blocks and prefills attend with every mask and with shared schedules, in one pool of slots and in two."""
    output = tmp_path / "errors.json"
    command = [sys.executable, SCRIPT, "fa3", "float32", "16", "8", "2", "64", output]
    env = os.environ | CPU | {"PYTHONPATH": python_path("fast_interpreter")}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-4000:]
    errors = json.loads(output.read_text())
    prefills = {mask for mask in errors if mask.startswith("prefill of ")}
    eager = {mask for mask in errors if not mask.startswith("replayed: ")} - prefills
    assert len(eager) == 12 and set(errors) == eager | {f"replayed: {mask}" for mask in eager} | prefills
    # Prefills of three numbers of requests have the causal masks.
    assert len(prefills) == 3 * 8
    assert max(errors.values()) < 1e-5
