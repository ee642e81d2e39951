"""The time on the CPU."""

from __future__ import annotations

import time

import torch


def read_clock(times: torch.Tensor, index: int) -> None:
    """Write the time of the device into `times[index]`: [n] int64, ns since some moment."""
    times[index] = time.perf_counter_ns()
