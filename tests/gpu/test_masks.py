"""Every mask of a drafter layer, on every backend that draws it on a GPU, against a dense float64 reference."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "masks.py"

# Outputs are means of 8 to 216 values around 1 in float16; one key more or less in a window moves some of them by over
# ten times as much.
TOLERANCE = 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("page_size", "heads", "kv_heads", "head_dim"), [(1, 4, 4, 64), (16, 8, 2, 128), (64, 8, 1, 64)]
)
@pytest.mark.parametrize("backend", ["fa3", "flashinfer", "triton"])
def test_masks(backend, page_size, heads, kv_heads, head_dim, tmp_path):
    output = tmp_path / "errors.json"
    command = [sys.executable, SCRIPT, backend, "float16", page_size, heads, kv_heads, head_dim, output]
    run = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-4000:]
    errors = json.loads(output.read_text())
    print(f"\n{backend}, page {page_size}: {errors}")
    wrong = {mask: error for mask, error in errors.items() if mask.startswith(("refused: ", "in-tree: "))}
    right = {mask: error for mask, error in errors.items() if mask not in wrong}
    # The right side of a window narrower than the block; and SGLang's own plan, in which row j of a block sees up to j
    # keys too many.
    narrow, in_tree = {"refused: sliding 8, causal=False"}, {f"in-tree: sliding {w}, causal=True" for w in (8, 50)}
    assert set(wrong) == {"fa3": set(), "triton": narrow, "flashinfer": narrow | in_tree}[backend]
    assert len(right) == (8 if backend == "fa3" else 7)
    assert max(right.values()) < TOLERANCE
    assert min(wrong.values(), default=1.0) > 5 * TOLERANCE
