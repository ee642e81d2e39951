"""Compile the kernels of scripts/bench_kernels.py and of the training for a Hopper GPU, which need not be there.

A program of its own, since Triton decides once per process whether it compiles or interprets.
usage: compile_kernels.py

Prints a line per compiled kernel: its name and the length of its machine code.
"""

import argparse

import bench_kernels
import torch
import triton
from training.smollm2.decode_attention import triton_decode_attention
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from sglang_dflash.ops.kernels import pdl

ARGS = argparse.Namespace(vocab=151936, context=512, window=64)


class HopperDriver:
    """What Triton asks a driver before it compiles."""

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
        print(function.__name__, len(compiled.asm["cubin"]), flush=True)

    JITFunction.run = compile_only
    pdl.is_available = lambda device: True
    for make in bench_kernels.KERNELS:
        case = bench_kernels.build(make, bs=2, args=ARGS, seed=0)
        bench_kernels.twin(make.__name__, "kernels")(*case.arguments)
    queries, keys, values = (torch.zeros(2, *shape, dtype=torch.bfloat16) for shape in ((9, 64), *[(3, 200, 64)] * 2))
    triton_decode_attention(queries, keys, values, torch.tensor([100]))


if __name__ == "__main__":
    main()
