"""Clock of the GPU, read when the work before has ended. CUDA events inside a graph cannot report their times."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _read_clock_kernel(times, index):
    tl.store(times + index, tl.extra.cuda.globaltimer())


def read_clock(times: torch.Tensor, index: int) -> None:
    """See :func:`sglang_dflash.ops.reference.read_clock.read_clock`."""
    _read_clock_kernel[(1,)](times, index, num_warps=1)
