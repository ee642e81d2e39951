"""Linear layer of few rows, optionally with the gated activation after it, in torch."""

from __future__ import annotations

import torch
from torch.nn import functional

# MAX_ROWS holds for every layer. MAX_GATED_ROWS holds for gated layers of a multiple of GATED_COLUMNS columns and
# GATED_DEPTH depth.
MAX_ROWS, MAX_GATED_ROWS = 64, 128
GATED_COLUMNS, GATED_DEPTH = 96, 64


def max_rows(num_columns: int, depth: int, is_gated: bool) -> int:
    """Return the most rows that :func:`linear_few_rows` takes.

    Args:
        num_columns: columns of the result.
        depth: columns of the input.
        is_gated: as in `linear_few_rows`.
    """
    fits = num_columns % GATED_COLUMNS == 0 and depth % GATED_DEPTH == 0
    return MAX_GATED_ROWS if is_gated and fits else MAX_ROWS


def linear_few_rows(x: torch.Tensor, weight: torch.Tensor, is_gated: bool) -> torch.Tensor:
    """Multiply x by the transpose of the weight, with sums in float32.

    Args:
        x: [rows, depth] floating-point, at most :func:`max_rows` rows. Rows may be strided, columns not.
        weight: [columns, depth] of the same dtype, contiguous. If gated [2 * columns, depth], gate before up.
        is_gated: return silu(gate) * up. Both halves are rounded first, as in SGLang's `SiluAndMul`.

    Returns:
        [rows, columns] of the same dtype.
    """
    out = functional.linear(x.float(), weight.float()).to(x.dtype)
    if is_gated:
        gate, up = out.float().chunk(2, dim=-1)
        out = (functional.silu(gate) * up).to(x.dtype)
    return out
