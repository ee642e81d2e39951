"""Ordinary memory where SGLang asks for pinned memory, which PyTorch has only with an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _WithoutPinning(TorchFunctionMode):
    """Context in which PyTorch ignores `pin_memory=True` and `Tensor.pin_memory`."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*args, **kwargs)


def without_pinning(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """AROUND functions that pin memory without asking whether there is any."""
    with _WithoutPinning():
        return original(*args, **kwargs)
