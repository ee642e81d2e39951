"""Convolutions over the rows of a block, around the attention and the MLP of a layer.

They connect the rows of one block, which attention alone treats as unordered but for their positions. The context is
not convolved.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.utils import add_prefix
from torch import nn

from sglang_dflash import ops
from sglang_dflash.checkpoint.config import Convolutions


class BlockConvolution(nn.Module):
    """The convolutions before and after one sublayer. Modules and parameters have the names of checkpoints."""

    def __init__(self, conv: Convolutions, hidden_size: int, prefix: str) -> None:
        super().__init__()
        self._taps = conv.taps
        self.base_kernel = nn.Parameter(torch.empty(2, conv.taps, hidden_size), requires_grad=False)
        # Every tensor-parallel rank computes all of the weights, which its part of a sum after a sublayer needs.
        self.kernel_projection = ReplicatedLinear(
            hidden_size,
            2 * conv.taps * hidden_size // conv.group_size,
            bias=False,
            prefix=add_prefix("kernel_projection", prefix),
        )

    def row_weights(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return what each row adds to the weights, [T, 2, taps, G], for the input of the sublayer, [T, H]."""
        delta, _ = self.kernel_projection(hidden_states)
        return delta.view(delta.shape[0], 2, self._taps, -1)

    def before(self, hidden_states: torch.Tensor, row_weights: torch.Tensor, rows: int) -> torch.Tensor:
        """Convolve the input of the sublayer, [T, H], in blocks of `rows` rows."""
        return ops.block_conv(hidden_states, row_weights, self.base_kernel, 0, rows)

    def after(self, hidden_states: torch.Tensor, row_weights: torch.Tensor, rows: int) -> torch.Tensor:
        """Convolve the output of the sublayer, [T, H]. It may be one rank's part of a sum: the operation is linear."""
        return ops.block_conv(hidden_states, row_weights, self.base_kernel, 1, rows)
