"""Every mask of a drafter layer, on every backend that supports it on a GPU, against a dense float64 reference.

Each is computed without a CUDA graph and in a replayed one. Causal masks of FA3 are also in graphs of prefills.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "masks.py"

# SGLang has FA3's kernels for these two dtypes, but not every build has both. FlashInfer compiles for minutes for each
# dtype, and other tests need bfloat16 too.
DTYPES = {"fa3": "bfloat16", "flashinfer": "bfloat16", "triton": "float16"}
# Four times the error of rounding an output; attention also rounds the weights of keys. One key more or less changes
# some outputs by over 0.25 in every mask.
TOLERANCES = {"bfloat16": 2**-6, "float16": 2**-9}


@pytest.mark.gpu
@pytest.mark.group("masks-{backend}")
@pytest.mark.parametrize(
    ("page_size", "heads", "kv_heads", "head_dim"), [(1, 4, 4, 64), (16, 8, 2, 128), (64, 8, 1, 64)]
)
@pytest.mark.parametrize("backend", ["fa3", "flashinfer", "triton"])
def test_masks(backend, page_size, heads, kv_heads, head_dim, tmp_path):
    output = tmp_path / "errors.json"
    dtype = DTYPES[backend]
    command = [sys.executable, SCRIPT, backend, dtype, page_size, heads, kv_heads, head_dim, output]
    run = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-4000:]
    errors = json.loads(output.read_text())
    print(f"\n{backend} in {dtype}, page {page_size}: {errors}")
    wrong = {mask: error for mask, error in errors.items() if mask.startswith(("refused: ", "in-tree: "))}
    right = {mask: error for mask, error in errors.items() if mask not in wrong}
    # FlashInfer cannot limit the right side of a window that is narrower than the block. In SGLang's own plan, row j of
    # a block sees up to j keys too many.
    narrow, in_tree = {"refused: sliding 8, causal=False"}, {f"in-tree: sliding {w}, causal=True" for w in (8, 50)}
    assert set(wrong) == (narrow | in_tree if backend == "flashinfer" else set())
    prefills = {mask for mask in right if mask.startswith("prefill of ")}
    eager = {mask for mask in right if not mask.startswith("replayed: ")} - prefills
    # 4 masks with a separate pool for sliding layers.
    assert len(eager) == (11 if backend == "flashinfer" else 12)
    assert set(right) == eager | {f"replayed: {mask}" for mask in eager} | prefills
    # Prefills of three numbers of requests have the causal masks.
    assert len(prefills) == (3 * 8 if backend == "fa3" else 0)
    assert max(right.values()) < TOLERANCES[dtype]
    assert min(wrong.values(), default=1.0) > 0.25
