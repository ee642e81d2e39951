"""A linear layer of few rows, with or without the gated activation behind it, in torch."""

from __future__ import annotations

import torch
from torch.nn import functional

# Of every layer; of a gated one whose columns and depth are multiples of these.
MAX_ROWS, MAX_GATED_ROWS = 64, 128
GATED_COLUMNS, GATED_DEPTH = 96, 64


def max_rows(num_columns: int, depth: int, is_gated: bool) -> int:
    """How many rows :func:`linear_few_rows` takes, by a weight of N columns (of its result) and K depth."""
    fits = num_columns % GATED_COLUMNS == 0 and depth % GATED_DEPTH == 0
    return MAX_GATED_ROWS if is_gated and fits else MAX_ROWS


def linear_few_rows(x: torch.Tensor, weight: torch.Tensor, is_gated: bool) -> torch.Tensor:
    """x times the weight's transpose, summed in float32.

    Args:
        x: [M, K] floating-point, M up to :func:`max_rows`; rows may be strided, columns not.
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
