"""Copies of weights in fewer bits, which are made again when the weights have changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

# Numbers of a weight that are quantised at a time. That takes a few times their memory in float32.
_NUMBERS = 1 << 22

_copies: weakref.WeakSet[WeightCopy] = weakref.WeakSet()
_are_stale = False


class WeightCopy:
    """Copy of a weight of this process. Updates of weights come in parts, so it waits for the next step.

    Attributes:
        tensors: results of `quantize` for all rows. CUDA graphs hold their addresses.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        quantize: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
        order: torch.Tensor | None = None,
        prepare: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """
        Args:
            weight: [rows, depth].
            quantize: returns tensors with a row for each row that it gets.
            order: [copied rows] int64. The weight's row of each row of the copy; None: the same.
            prepare: called with the whole weight before its rows are quantised.
        """
        self._weight, self._quantize, self._order, self._prepare = weight, quantize, order, prepare
        self._num_rows = len(weight) if order is None else len(order)
        self.tensors = tuple(part.new_empty((self._num_rows, *part.shape[1:])) for part in quantize(weight[:1]))
        self.fill()
        _copies.add(self)

    @torch.no_grad()
    def fill(self) -> None:
        """Make the copy from the present weights."""
        if self._prepare is not None:
            self._prepare(self._weight)
        step = max(1, _NUMBERS // self._weight.shape[1])
        for start in range(0, self._num_rows, step):
            rows = slice(start, start + step)
            weights = self._weight[rows if self._order is None else self._order[rows]]
            for tensor, part in zip(self.tensors, self._quantize(weights), strict=True):
                tensor[rows] = part


def weights_have_changed() -> None:
    """Note that weights of this process may have changed."""
    global _are_stale
    _are_stale = True


def refresh() -> None:
    """Make all copies again if weights have changed. Call it before a step."""
    global _are_stale
    if not _are_stale:
        return
    _are_stale = False
    for copy in _copies:
        copy.fill()
