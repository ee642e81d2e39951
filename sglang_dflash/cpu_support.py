"""The seam to `sglang-dflash-cpu`, a distribution of its own for machines without a GPU (`cpu/` of the repository).

Its plugin calls :func:`provide` in every process of a server. Users with a GPU do not install it.
"""

from __future__ import annotations

from typing import Protocol

from torch import nn


class CpuLayers(Protocol):
    """Linear layers that are faster than SGLang's for the few tokens of verified blocks."""

    def install(self, model: nn.Module) -> None:
        """Replace the layers of a loaded model."""

    def forget_weights(self) -> None:
        """Drop every copy of weights."""


_layers: CpuLayers | None = None


def provide(layers: CpuLayers) -> None:
    """Make `layers` the ones that :func:`install_layers` uses."""
    global _layers
    _layers = layers


def is_provided() -> bool:
    """Return True once the plugin of `sglang-dflash-cpu` is loaded."""
    return _layers is not None


def install_layers(model: nn.Module) -> None:
    """Replace the linear layers of a loaded model on the CPU, which `hooks.verify` has checked to be provided."""
    assert _layers is not None
    _layers.install(model)


def weights_have_changed() -> None:
    """Drop copies of weights, if there are any."""
    if _layers is not None:
        _layers.forget_weights()
