"""Programmatic dependent launch: a kernel begins while the one before it still runs, and waits for it by itself."""

from __future__ import annotations

from functools import cache

import torch


@cache
def is_available(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
