"""Top-k of a matrix product by a shortlist in int4 or float8, in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_dflash.ops.reference.split_rows import LARGEST, round_to_int8
from sglang_dflash.ops.scaled import scale_rows

# Most rows for which the product with the int4 copy is faster.
MAX_INT4_ROWS = 64

FLOAT8 = torch.float8_e4m3fn
LARGEST_FLOAT8 = torch.finfo(FLOAT8).max
# The depth of a product is a multiple of this.
DEPTH = 256
# Columns in a group, of which only the best is a candidate.
GROUP = 64
# Steps of int4 in each direction, and shares of a column's largest number that they may reach.
_STEPS, _SHARES = 8, (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
# Numbers that are read at a time.
_NUMBERS = 1 << 22
# Most candidates of a part of the groups.
_QUOTA = 8


@dataclass(frozen=True)
class Int4Copy:
    """Copy of a weight, [columns, depth], for few rows. Its columns are in the order of `spread_order`.

    Attributes:
        numbers, scales: [groups * GROUP, depth / 2] int8 and [groups * GROUP] float32, contiguous. Of `quantize_int4`.
        factors: [depth] float32. Of `depth_factors`.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    factors: torch.Tensor


@dataclass(frozen=True)
class Float8Copy:
    """Copy of a weight, [columns, depth], for any number of rows. Its columns are in the order of `spread_order`.

    Attributes:
        numbers, scales: [groups * GROUP, depth] float8_e4m3fn and [groups * GROUP] float32, contiguous. Of
            `quantize_float8`.
    """

    numbers: torch.Tensor
    scales: torch.Tensor


def num_candidates(k: int, is_int4: bool) -> int:
    """Return the number of columns to compute at full precision for the top k: a power of two.

    Int4 orders columns less precisely, so more of them may be among the best.
    """
    return (4 if is_int4 else 2) << (k - 1).bit_length()


def parts_of(candidates: int) -> tuple[int, int]:
    """Return the number of parts of the groups, and the candidates of each part."""
    quota = min(_QUOTA, candidates)
    return candidates // quota, quota


def spread_order(num_columns: int, device: torch.device) -> torch.Tensor:
    """Return the columns in the order of the copy, [groups * GROUP] int64: those of the first group, of the next, ...

    The best tokens of a position are often neighbours in the vocabulary, as frequent tokens are. Only one token of a
    group is a candidate. So a group takes every n-th column, where n is the number of groups. In place of columns after
    the end there is the last one.
    """
    num_groups = -(-num_columns // GROUP)
    in_order = torch.arange(num_groups * GROUP, device=device).view(GROUP, num_groups).T.flatten()
    return in_order.clamp(max=num_columns - 1)


def depth_factors(weight: torch.Tensor) -> torch.Tensor:
    """Return factors, [depth] float32, that a weight is divided by, and rows are multiplied by.

    A few places of the depth have much larger numbers than the rest. With the roots of their root mean squares as
    factors, both sides have less of a spread (SmoothQuant, arXiv 2211.10438).

    Args:
        weight: [columns, depth] floating-point.
    """
    squares = torch.zeros(weight.shape[1], device=weight.device)
    for part in weight.split(max(1, _NUMBERS // weight.shape[1])):
        squares += part.float().square().sum(dim=0)
    factors = (squares / len(weight)).pow(0.25)
    return torch.where((factors > 0) & factors.isfinite(), factors, 1.0)


def quantize_int4(weight: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise columns of a product to int4, with the scale of each that has the least squared error.

    Args:
        weight: [columns, depth] floating-point.
        factors: [depth] float32 of `depth_factors`.

    Returns:
        numbers: [columns, depth / 2] int8. In each DEPTH numbers of a column, byte j has number j in its high bits and
            number DEPTH / 2 + j in its low bits.
        scales: [columns] float32. `unpack(numbers) * scales * factors` approximates the weight.
    """
    weight = weight.float() / factors
    largest = weight.abs().amax(dim=-1, keepdim=True)
    least, scales = torch.full_like(largest, torch.inf), largest
    for share in _SHARES:
        tried = torch.where(largest > 0, largest, 1.0) * (share / (_STEPS - 0.5))
        error = (_to_int4(weight, tried) * tried - weight).square().sum(dim=-1, keepdim=True)
        scales = torch.where(error < least, tried, scales)
        least = torch.minimum(error, least)
    # The scale of a column with NaN or infinity is that number.
    high, low = _to_int4(weight, scales).nan_to_num().to(torch.int8).unflatten(1, _halves(weight.shape[1])).unbind(2)
    return ((high << 4) | (low & 15)).flatten(1), scales[:, 0]


def _to_int4(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (weight / scales).round().clamp(-_STEPS, _STEPS - 1)


def _halves(depth: int) -> tuple[int, int, int]:
    # A smaller depth is one step.
    block = min(DEPTH, depth)
    return depth // block, 2, block // 2


def unpack(numbers: torch.Tensor) -> torch.Tensor:
    """Return the numbers of :func:`quantize_int4`, [columns, depth] int8."""
    blocks = numbers.unflatten(1, _halves(2 * numbers.shape[1])[::2])
    return torch.stack((blocks >> 4, (blocks << 4) >> 4), dim=2).flatten(1)


def quantize_float8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows or columns of a product to float8, each scaled so that its largest number is the dtype's largest.

    Args:
        x: [rows, depth] floating-point.

    Returns:
        numbers: [rows, depth] float8_e4m3fn.
        scales: [rows] float32. `numbers * scales` approximates x.
    """
    numbers, scales = scale_rows(x, LARGEST_FLOAT8)
    return numbers.clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(FLOAT8), scales


def quantize_int8(x: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows of a product with an int4 copy to int8.

    Args:
        x: [rows, depth] floating-point.
        factors: [depth] float32 of `depth_factors`.

    Returns:
        numbers: [rows, depth] int8.
        scales: [rows] float32. `numbers * scales` approximates `x * factors`.
    """
    numbers, scales = scale_rows(x.float() * factors, LARGEST)
    return round_to_int8(numbers).nan_to_num().to(torch.int8), scales


def shortlist_top(
    x: torch.Tensor, weight: torch.Tensor, copy: Int4Copy | Float8Copy, k: int, has_sums: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the top k of every row of x times the transpose of the weight, with their columns.

    A product with the copy finds the best column of every group. A group is every n-th column, where n is the number of
    groups. A part is every n-th group, where n is the number of parts. The columns of the best groups of each part are
    computed in float32.

    The result is approximate in three cases. Two of the top k may be in one group. More of them than its quota may be
    in one part. Or more groups than the candidates may differ by less than the copy resolves.

    Args:
        x: [bs, positions, depth] bfloat16 or float16. Columns are contiguous; depth is a multiple of DEPTH.
        weight: [columns, depth] of the same dtype, contiguous.
        copy: of the weight. An `Int4Copy` takes up to MAX_INT4_ROWS rows.
        k: at most the number of groups.
        has_sums: compute `log_sums`.

    Returns:
        logits: [bs * positions, k] float32, rounded to x's dtype, descending. -inf stands for NaN.
        columns: [bs * positions, k] int64. Of equal logits the lower column comes first.
        log_sums: [bs * positions] float32. Log-sum-exp of all columns, by the copy's estimates of those that are no
            candidates. None without `has_sums`.
    """
    rows, num_columns = x.flatten(0, 1), weight.shape[0]
    num_groups = -(-num_columns // GROUP)
    estimates = _estimates(rows, copy, num_groups)[:, :num_columns]
    padded = torch.nn.functional.pad(estimates, (0, num_groups * GROUP - num_columns), value=-torch.inf)
    best_of_groups, in_group = padded.unflatten(1, (GROUP, num_groups)).max(dim=1)
    num_parts, quota = parts_of(num_candidates(k, isinstance(copy, Int4Copy)))
    groups = []
    for part in range(min(num_parts, num_groups)):
        of_part = best_of_groups[:, part::num_parts]
        groups.append(of_part.topk(min(quota, of_part.shape[1])).indices * num_parts + part)
    groups = torch.cat(groups, dim=1)
    candidates = (in_group.gather(1, groups) * num_groups + groups).sort(dim=-1).values
    logits = (weight[candidates].float() * rows.float()[:, None]).sum(dim=-1).to(x.dtype).float()
    logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    # A stable sort keeps the order of equal values. topk does not guarantee it.
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    best = values[:, :k].contiguous(), candidates.gather(1, order)[:, :k].contiguous()
    if not has_sums:
        return *best, None
    others = estimates.scatter(1, candidates, -torch.inf)
    return *best, torch.cat((others, logits), dim=1).logsumexp(dim=-1)


def _estimates(rows: torch.Tensor, copy: Int4Copy | Float8Copy, num_groups: int) -> torch.Tensor:
    """Return the products of rows with a copy, in the order of the weight."""
    if isinstance(copy, Int4Copy):
        rows8, row_scales = quantize_int8(rows, copy.factors)
        # Exact: the sums are smaller than 2**53.
        sums = (rows8.double() @ unpack(copy.numbers).double().T).float()
    else:
        rows8, row_scales = quantize_float8(rows)
        sums = rows8.float() @ copy.numbers.float().T
    products = (sums * copy.scales * row_scales[:, None]).nan_to_num(nan=-torch.inf)
    return products.unflatten(1, (num_groups, GROUP)).mT.flatten(1)
