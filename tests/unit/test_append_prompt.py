"""A long prompt is appended to the drafter's context in chunks; tests/gpu/test_prefill_memory.py says why."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench.pairs import SHAPES

SCRIPT = Path(__file__).parents[1] / "support" / "append_prompt.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="SGLang's norms take no float32 there; see tests/gpu")
def test_chunks_are_the_whole(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["small-dflash"]))
    output = tmp_path / "result.json"
    # The last chunk is shorter than the others.
    command = [sys.executable, SCRIPT, tmp_path, "float32", "9000", output]
    run = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-4000:]
    result = json.loads(output.read_text())
    assert result["chunks"] == [3, 1]
    assert result["error"] < 1e-5
