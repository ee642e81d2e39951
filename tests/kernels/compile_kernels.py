"""Compile the kernels of scripts/bench_kernels.py and of the training for a Hopper GPU, without such a GPU.

It is a program because Triton decides once per process whether it compiles or interprets.
usage: compile_kernels.py

It prints the name of each compiled kernel and the length of its machine code.
"""

import argparse

import bench_kernels
import torch
import triton
from training.smollm2.decode_attention import triton_decode_attention
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from sglang_dflash.ops.kernels import pdl
from sglang_dflash.ops.kernels.attend_trees import SHARED_MEMORY, attend_trees, split_trees
from sglang_dflash.ops.kernels.linear_few_rows import linear_few_rows

ARGS = argparse.Namespace(vocab=151936, context=512, window=64)


class HopperDriver:
    """Driver that answers what Triton asks before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    triton.runtime.driver.set_active(HopperDriver())
    launch = JITFunction.run

    def compile_only(function, *args, grid, warmup, **kwargs):
        compiled = launch(function, *args, grid=grid, warmup=True, **kwargs)
        assert compiled.metadata.shared <= SHARED_MEMORY, function.__name__
        print(function.__name__, len(compiled.asm["cubin"]), flush=True)

    JITFunction.run = compile_only
    pdl.is_available = lambda device: True
    for make in bench_kernels.KERNELS:
        case = bench_kernels.build(make, bs=2, args=ARGS, seed=0)
        bench_kernels.twin(make.__name__, "kernels")(*case.arguments)
    # More rows than two blocks have.
    linear_few_rows(torch.zeros(128, 256).bfloat16(), torch.zeros(384, 256).bfloat16(), is_gated=True)
    queries, keys, values = (torch.zeros(2, *shape, dtype=torch.bfloat16) for shape in ((9, 64), *[(3, 200, 64)] * 2))
    triton_decode_attention(queries, keys, values, torch.tensor([100]))
    # A layer with every option; DeepSeek's layer, whose values are part of the keys; and float32. For 32 trees thread
    # blocks merge their parts themselves.
    for bs in (2, 32):
        compile_trees(bs, 64, 8, 128, torch.bfloat16, torch.float8_e4m3fn, has_window=True)
        compile_trees(bs, 16, 1, 576, torch.bfloat16, torch.bfloat16, has_window=False)
    compile_trees(2, 8, 4, 64, torch.float32, torch.float32, has_window=False)


def compile_trees(
    bs: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype, kv_dtype: torch.dtype, has_window: bool
) -> None:
    """Compile attention of trees of 16 nodes. `has_window` adds a slot map, a logit cap and sinks."""
    query = torch.zeros(16 * bs, heads, size, dtype=dtype)
    k_cache, v_cache = torch.zeros(2, 64, kv_heads, size).to(kv_dtype)
    if size == 576:
        v_cache = k_cache[..., :512]
    slots, lens = torch.zeros(bs, 64, dtype=torch.int32), torch.arange(bs)
    slot_map, sinks = (torch.arange(64), torch.zeros(heads)) if has_window else (None, None)
    nodes, ancestors = torch.arange(16 * bs), torch.ones(bs, 16, dtype=torch.int64)
    window = 512 if has_window else None
    split = split_trees(lens, lens, window, 16, heads, kv_heads, size, v_cache.shape[2], dtype)
    attend_trees(
        *(query, k_cache, v_cache, slots, lens, slot_map, lens, nodes, ancestors),
        *(0.1, window, 50.0 * has_window, sinks, 1.0, 1.0, split),
    )


if __name__ == "__main__":
    main()
