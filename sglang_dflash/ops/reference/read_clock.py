"""Clock of the CPU."""

from __future__ import annotations

import time

import torch


def read_clock(times: torch.Tensor, index: int) -> None:
    """Write the device's time into `times[index]`: [n] int64, nanoseconds since an arbitrary moment."""
    times[index] = time.perf_counter_ns()
