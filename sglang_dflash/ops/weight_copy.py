"""Copies of weights in fewer bits, which are made again when the weights have changed."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod

import torch

_copies: weakref.WeakSet[WeightCopy] = weakref.WeakSet()
_are_stale = False


class WeightCopy(ABC):
    """Copy of a weight of this process. CUDA graphs hold its address, so it is filled in place.

    Updates of weights come in parts, so a copy waits for the next step.
    """

    def __init__(self) -> None:
        _copies.add(self)

    @abstractmethod
    def fill(self) -> None:
        """Make the copy from the present weights."""


def weights_have_changed() -> None:
    """Note that weights of this process may have changed."""
    global _are_stale
    _are_stale = True


@torch.no_grad()
def refresh() -> None:
    """Make all copies again if weights have changed. Call it before a step."""
    global _are_stale
    if not _are_stale:
        return
    _are_stale = False
    for copy in _copies:
        copy.fill()
