"""A linear layer of few rows, with or without the gated activation behind it, in torch."""

from __future__ import annotations

import torch
from torch.nn import functional

# The most rows of a gated layer, and what its columns and depth have to be multiples of beyond 64 rows.
MAX_GATED_ROWS, GATED_COLUMNS, GATED_DEPTH = 128, 96, 64


def linear_few_rows(x: torch.Tensor, weight: torch.Tensor, is_gated: bool) -> torch.Tensor:
    """x times the weight's transpose, summed in float32.

    Args:
        x: [M, K] floating-point, M up to 64, or up to MAX_GATED_ROWS if the layer is gated, N a multiple of
            GATED_COLUMNS and K of GATED_DEPTH; rows may be strided, columns not.
        weight: [N, K] of the same dtype, contiguous; where gated [2 * N, K], gate before up.
        is_gated: return silu(gate) * up, as SGLang's `SiluAndMul` computes it from rounded halves.

    Returns:
        [M, N] of the same dtype.
    """
    out = functional.linear(x.float(), weight.float()).to(x.dtype)
    if is_gated:
        gate, up = out.float().chunk(2, dim=-1)
        out = (functional.silu(gate) * up).to(x.dtype)
    return out
