"""The context of a long prompt is appended in bounded memory, without the host waiting for the GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.pairs import SHAPES

SCRIPT = Path(__file__).parents[1] / "support" / "append_prompt.py"

ROWS = 32768
LIMIT = 512 * 2**20


@pytest.mark.gpu
def test_prefill_memory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-8b-dflash"]))
    output = tmp_path / "result.json"
    command = [sys.executable, SCRIPT, tmp_path, "bfloat16", ROWS, output]
    run = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    result = json.loads(output.read_text())
    cut, whole = result["peak_bytes"]
    print(f"\n{ROWS} rows: {cut / 2**20:.0f} MiB in {result['chunks'][0]} chunks, {whole / 2**20:.0f} MiB in one piece")
    assert cut < LIMIT
    # Otherwise the measurement would not show what the chunks save.
    assert whole > LIMIT
    # bf16 rounds hidden states between two matrix products, whose sums are split by the number of rows.
    assert result["error"] < 2e-2
