"""Largest column of a matrix product for every row, with bounds from an int8 copy of the weights, in torch."""

from __future__ import annotations

import torch

from sglang_dflash.ops.reference.split_rows import LARGEST
from sglang_dflash.ops.scaled import scale_rows

# The bound is this many times scale * |x|: see `quantize_randomly`.
CONFIDENCE = 4.5
# Columns whose largest bound is kept.
GROUP = 16
# The depth of a product is a multiple of this.
DEPTH = 256
# Most rows that were measured.
MAX_ROWS = 128


def quantize_randomly(
    weight: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise rows of weights to int8, and round each number up or down at random, so that its mean is exact.

    The errors of a row's numbers are independent. Each lies in an interval of length `scale` and has the mean 0. By
    Hoeffding's inequality, a product with x exceeds that of the copy by more than c * scale * |x| with probability
    exp(-2 c^2) at most. That is 3e-18 for c = CONFIDENCE. Rounding to nearest has no such bound: all errors of a row
    may have the sign of x.

    Args:
        weight: [rows, depth] floating-point.
        generator: of the weight's device. Ranks need no common one.

    Returns:
        numbers: [rows, depth] int8.
        scales: [rows] float32. `numbers * scales` approximates the weight.
        norms: [rows] float32. Euclidean norms of `numbers * scales`.
    """
    exact, scales = scale_rows(weight, LARGEST)
    dither = torch.rand(weight.shape, generator=generator, device=weight.device)
    numbers = (exact + dither).floor().clamp(-LARGEST, LARGEST)
    return numbers.to(torch.int8), scales, numbers.norm(dim=-1) * scales


def argmax_product(
    x: torch.Tensor, weight: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, norms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest column of every row of x times the transpose of the weight.

    The copy decides which columns need not be computed. It does not change the result, up to the bound's probability.

    Args:
        x: [T, depth] bfloat16 or float16. Columns are contiguous; depth is a multiple of DEPTH.
        weight: [columns, depth] of the same dtype, contiguous, finite.
        numbers, scales, norms: `quantize_randomly(weight)`, contiguous.

    Returns:
        maxima: [T] of x's dtype. The products are summed in float32 and rounded to it.
        columns: [T] int64. Of equal products the lowest column is returned. A row without numbers has column 0.
    """
    products = (x.float() @ weight.float().T).to(x.dtype)
    products = torch.where(products.isnan(), -torch.inf, products)
    maxima = products.amax(dim=-1)
    return maxima, (products == maxima[:, None]).int().argmax(dim=-1)
