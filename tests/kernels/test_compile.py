"""Kernels compile for a GPU that need not be present. Triton's interpreter also accepts code that does not compile."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.gpus import GPUS

ROOT = Path(__file__).parents[2]


# Of scripts/training, and what moves nothing, which the benchmark does not measure.
TRAINING, UNMEASURED = {"_decode_attention_kernel"}, {"_read_clock_kernel"}
# Attention of trees.
TREES = {"_attend_trees_kernel", "_divide_keys_kernel", "_merge_parts_kernel"}
# Only a Hopper GPU runs them.
HOPPER_ONLY = {"_add_rms_norm_kernel", "_linear_few_rows_kernel", "_linear_gated_rows_kernel"}
HOPPER_ONLY |= {"_quantize_kernel", "_shortlist_kernel", "_candidates_kernel", "_best_kernel", "_split_rows_kernel"}
HOPPER_ONLY |= {"_bounds_kernel", "_best_column_kernel", "_linear_int8_kernel"}
# Those that share code are compiled for by one program.
SHARING = [
    [gpu, *(name for name in GPUS if GPUS[name].same_code_as == gpu)] for gpu in GPUS if GPUS[gpu].same_code_as is None
]


@pytest.mark.parametrize("sharing", SHARING, ids=" ".join)
def test_every_kernel_compiles(sharing):
    """For each compute capability, within the shared memory of its thread blocks."""
    program = Path(__file__).with_name("compile_kernels.py")
    path = os.pathsep.join([str(ROOT / "scripts"), *sys.path])
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path}
    run = subprocess.run([sys.executable, program, *sharing], env=env, capture_output=True, text=True, timeout=600)

    assert run.returncode == 0, run.stderr[-4000:]
    sources = (ROOT / "sglang_dflash/ops/kernels").glob("*.py")
    kernels = {name for source in sources for name in re.findall(r"def (\w+_kernel)\(", source.read_text())}
    everywhere = kernels - UNMEASURED - HOPPER_ONLY
    lines = [line.split() for line in run.stdout.splitlines()]
    for gpu in sharing:
        if GPUS[gpu].same_code_as is not None:
            expected = TREES
        else:
            expected = kernels - UNMEASURED | TRAINING if gpu == "sm_90" else everywhere
        assert {kernel for name, kernel, _ in lines if name == gpu} == expected
