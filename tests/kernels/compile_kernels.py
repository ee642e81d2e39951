"""Compile the kernels for a GPU, without such a GPU, and compare their shared memory with its limit.

It is a program because Triton decides once per process whether it compiles or interprets.
usage: compile_kernels.py GPU ...    (names of `support.gpus.GPUS`, such as sm_90)

It prints the GPU, the name of each compiled kernel and its bytes of shared memory. Where another GPU gets the same
code, only attention of trees is compiled, whose tiles are chosen by the GPU's shared memory.
"""

import argparse
import os
import sys

import bench_kernels
import torch
import triton
from support.gpus import GPUS, Gpu
from training.smollm2.decode_attention import triton_decode_attention
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from sglang_dflash.checkpoint.config import MAX_NODES
from sglang_dflash.draft import shortlist
from sglang_dflash.ops.kernels import attend_trees as trees
from sglang_dflash.ops.kernels import fp8, pdl
from sglang_dflash.ops.kernels.argmax_product import argmax_product
from sglang_dflash.ops.kernels.linear_few_rows import linear_few_rows
from sglang_dflash.ops.kernels.linear_int8 import linear_int8
from sglang_dflash.ops.kernels.shortlist_top import shortlist_top
from sglang_dflash.ops.reference.shortlist_top import Float8Copy, Int4Copy

ARGS = argparse.Namespace(vocab=151936, context=512, window=64)
# Only Hopper GPUs run them (`ops.small_m_linear.is_measured`).
HOPPER_ONLY = (
    "add_rms_norm",
    "argmax_product",
    "linear_few_rows",
    "linear_int8",
    "shortlist_of_chains",
    "shortlist_top",
    "split_rows",
)
NUM_NODES = 16
TREE_KERNEL = "_attend_trees_kernel"
# Layers of targets: query heads, KV heads, numbers of a key and of a value.
LAYERS = {
    "Qwen3-8B": (32, 8, 128, 128),
    "gpt-oss": (64, 8, 64, 64),
    "Qwen3.5": (16, 4, 256, 256),
    "DeepSeek V3": (16, 1, 576, 512),
    "Gemma 4": (32, 4, 512, 512),
}


class Driver:
    """Driver that answers what Triton asks before it compiles."""

    def __init__(self, gpu: Gpu) -> None:
        self._target = GPUTarget("cuda", gpu.sm, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def shared_memory_for(kernel: str, gpu: Gpu) -> int:
    """Return the bytes that a kernel may need: what every GPU with this code has.

    Attention of trees chooses a tile for each GPU.
    """
    if kernel == TREE_KERNEL:
        return gpu.shared_memory
    return min(other.shared_memory for other in GPUS.values() if other.sm == gpu.sm or other.same_code_as == gpu.name)


def compile_for(gpu: Gpu) -> None:
    """Make every launch in this process compile its kernel for `gpu`, and run nothing."""
    triton.runtime.driver.set_active(Driver(gpu))
    launch = JITFunction.run

    def compile_only(function, *args, grid, warmup, **kwargs):
        compiled = launch(function, *args, grid=grid, warmup=True, **kwargs)
        name, shared = function.__name__, compiled.metadata.shared
        assert shared <= shared_memory_for(name, gpu), (name, shared)
        assert compiled.asm["cubin"]
        print(gpu.name, name, shared, flush=True)
        return compiled

    JITFunction.run = compile_only
    pdl.is_available = lambda device: gpu.sm >= 90
    fp8.has_e4m3 = lambda device: gpu.sm >= 89
    trees._shared_memory = lambda device: gpu.shared_memory


def quantize_randomly(weight: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Return tensors as the function of this name. Their numbers do not matter here, and a vocabulary takes long."""
    return torch.zeros(weight.shape, dtype=torch.int8), *torch.ones(2, len(weight)).unbind()


def compile_benchmarked(gpu: Gpu) -> None:
    bench_kernels.quantize_randomly = quantize_randomly
    # Copies of one column are enough.
    shortlist.spread_order = lambda num_columns, device: torch.zeros(1, dtype=torch.int64)
    shortlist.depth_factors = lambda weight: torch.ones(weight.shape[1])
    for make in bench_kernels.KERNELS:
        if gpu.sm == 90 or make.__name__ not in HOPPER_ONLY:
            case = bench_kernels.build(make, bs=2, args=ARGS, seed=0)
            bench_kernels.twin(make.__name__, "kernels")(*case.arguments)
    # Recurrent layers with the largest trees.
    bench_kernels.BLOCK_SIZE = MAX_NODES
    for make in (bench_kernels.convolve_nodes, bench_kernels.verify_block, bench_kernels.commit_state):
        case = bench_kernels.build(make, bs=2, args=ARGS, seed=0)
        bench_kernels.twin(make.__name__, "kernels")(*case.arguments)
    if gpu.sm == 90:
        # More rows than two blocks have.
        linear_few_rows(torch.zeros(128, 256).bfloat16(), torch.zeros(384, 256).bfloat16(), is_gated=True)
        # Every tiling.
        for rows, is_gated in ((32, False), (32, True), (64, True)):
            weight8 = torch.zeros(256 * (1 + is_gated), 512, dtype=torch.int8)
            linear_int8(torch.zeros(rows, 512).bfloat16(), weight8, torch.zeros(len(weight8)), is_gated)
        weight, numbers = torch.zeros(256, 512).bfloat16(), torch.zeros(256, 512, dtype=torch.int8)
        for rows in (16, 32, 64, 128):
            argmax_product(torch.zeros(rows, 512).bfloat16(), weight, numbers, *torch.ones(2, 256).unbind())
        copies = {
            # Rows of the largest tile of each tiling.
            Int4Copy(torch.zeros(256, 256, dtype=torch.int8), torch.ones(256), torch.ones(512)): (16, 32, 64),
            Float8Copy(torch.zeros(256, 512, dtype=torch.float8_e4m3fn), torch.ones(256)): (128, 256),
        }
        for copy, tiles in copies.items():
            for rows in tiles:
                shortlist_top(torch.zeros(1, rows, 512).bfloat16(), weight, copy, 4, True)
        queries, keys, values = (
            torch.zeros(2, *shape, dtype=torch.bfloat16) for shape in ((9, 64), *[(3, 200, 64)] * 2)
        )
        triton_decode_attention(queries, keys, values, torch.tensor([100]))


def compile_trees(
    bs: int,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype = torch.bfloat16,
    has_all: bool = False,
) -> None:
    """Compile attention of trees of 16 nodes.

    Args:
        bs: requests. Thread blocks merge parts themselves where there are many.
        shape: of a layer, as in `LAYERS`.
        has_all: with a window, a slot map, a cap and sinks.
    """
    heads, kv_heads, key_size, value_size = shape
    query = torch.zeros(NUM_NODES * bs, heads, key_size, dtype=dtype)
    k_cache, v_cache = (torch.zeros(64, kv_heads, size).to(kv_dtype) for size in (key_size, value_size))
    if key_size != value_size:
        # The values of latent attention are part of its keys.
        v_cache = k_cache[..., :value_size]
    slots, lens = torch.zeros(bs, 64, dtype=torch.int32), torch.arange(bs)
    slot_map, sinks = (torch.arange(64), torch.zeros(heads)) if has_all else (None, None)
    nodes, ancestors = torch.arange(NUM_NODES * bs), torch.ones(bs, NUM_NODES, dtype=torch.int64)
    window = 512 if has_all else None
    split = trees.split_trees(lens, lens, window, NUM_NODES, *shape, dtype)
    trees.attend_trees(
        *(query, k_cache, v_cache, slots, lens, slot_map, lens, nodes, ancestors),
        *(0.1, window, 50.0 * has_all, sinks, 1.0, 1.0, split),
    )


def check_bound(gpu: Gpu) -> None:
    """Make launches of `attend_trees` compare what they need with what its tile was chosen by."""
    launch, fitting_tile, chosen = JITFunction.run, trees._Layout.fitting_tile, []

    def fit(*args):
        chosen.append(fitting_tile(*args))
        return chosen[-1]

    def compare(function, *args, **kwargs):
        compiled = launch(function, *args, **kwargs)
        # The others keep more there, and have room for it.
        if function.__name__ == TREE_KERNEL and gpu.capability[0] not in (9, 10):
            assert compiled.metadata.shared <= chosen[-1][1], (compiled.metadata.shared, chosen[-1])
        return compiled

    trees._Layout.fitting_tile, JITFunction.run = fit, compare


def main(gpu: Gpu) -> None:
    compile_for(gpu)
    if gpu.same_code_as is None:
        compile_benchmarked(gpu)
    check_bound(gpu)
    for shape in LAYERS.values():
        compile_trees(2, shape)
    compile_trees(32, LAYERS["Qwen3-8B"], kv_dtype=torch.float8_e4m3fn, has_all=True)
    compile_trees(2, LAYERS["DeepSeek V3"], kv_dtype=torch.float8_e4m3fn)
    compile_trees(32, LAYERS["Gemma 4"])
    compile_trees(2, (8, 4, 64, 64), torch.float32, torch.float32)


if __name__ == "__main__":
    # What a process compiles for one GPU, it does not compile again. All of them share what this one has imported.
    for name in sys.argv[1:]:
        child = os.fork()
        if child == 0:
            main(GPUS[name])
            sys.exit()
        _, status = os.waitpid(child, 0)
        if status != 0:
            sys.exit(f"compiling for {name} has failed")
