"""Linear layer of few rows with weights in int8, optionally with the gated activation after it, in torch."""

from __future__ import annotations

import torch
from torch.nn import functional

from sglang_dflash.ops.reference.split_rows import LARGEST, LOW_STEPS, split_rows
from sglang_dflash.ops.scaled import scale_rows

# Most rows: more are faster with bfloat16 weights.
MAX_ROWS, MAX_GATED_ROWS = 32, 64
# The input's columns are a multiple of this.
DEPTH = 256


def max_rows(is_gated: bool) -> int:
    """Return the most rows that :func:`linear_int8` takes."""
    return MAX_GATED_ROWS if is_gated else MAX_ROWS


def quantize_columns(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight to int8, each column of its products scaled by the column's largest magnitude.

    Args:
        weight: [columns, depth] floating-point.

    Returns:
        numbers: [columns, depth] int8, in -LARGEST..LARGEST.
        scales: [columns] float32. `numbers * scales` approximates the weight.
    """
    numbers, scales = scale_rows(weight, LARGEST)
    return numbers.round().clamp(-LARGEST, LARGEST).to(torch.int8), scales


def linear_int8(x: torch.Tensor, weight8: torch.Tensor, scales: torch.Tensor, is_gated: bool) -> torch.Tensor:
    """Multiply x by the transpose of a weight in int8, with exact sums of int8 products.

    Args:
        x: [rows, depth] bfloat16 or float16, at most :func:`max_rows`. Rows may be strided, columns not. The depth is a
            multiple of DEPTH. Rows enter as :func:`sglang_dflash.ops.reference.split_rows.split_rows` splits them.
        weight8: [columns, depth] int8, contiguous. If gated [2 * columns, depth], gate before up.
        scales: [columns] or [2 * columns] float32. With `weight8`, the results of :func:`quantize_columns`.
        is_gated: return silu(gate) * up. Both halves are rounded first, as in SGLang's `SiluAndMul`.

    Returns:
        [rows, columns] of x's dtype.
    """
    parts, row_scales, _, _ = split_rows(x)
    # Exact: the sums are smaller than 2**53.
    high, low = functional.linear(parts.double(), weight8.double()).float()
    out = ((high + low / LOW_STEPS) * scales * row_scales[:, None]).to(x.dtype)
    if is_gated:
        gate, up = out.float().chunk(2, dim=-1)
        out = (functional.silu(gate) * up).to(x.dtype)
    return out
