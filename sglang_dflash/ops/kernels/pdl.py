"""Programmatic dependent launch: a kernel starts while the one before still runs, and waits for its output itself."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def is_available(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_and_release(PDL: tl.constexpr):
    """Wait for the output of the kernel before, and let the next kernel start.

    It is the first step of a kernel that is launched with `launch_pdl`. The next kernel waits for this one's output
    itself.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
