"""The best columns of a product for every row by a shortlist in float8, in torch."""

from __future__ import annotations

import torch

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
# Rows have a multiple of so many numbers.
DEPTH = 256


def group_size(k: int) -> int:
    """Columns of which only the best one is a candidate, where k are to be found."""
    return 128 if k == 1 else 64


def num_candidates(k: int) -> int:
    """A power of two: so many columns are computed as they are."""
    return 8 if k == 1 else 2 << (k - 1).bit_length()


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in float8, each scaled so that its largest number is the dtype's.

    Args:
        x: [rows, K] floating-point.

    Returns:
        numbers: [rows, K] float8_e4m3fn.
        scales: [rows] float32, so that `numbers * scales` is about x.
    """
    scales = x.abs().amax(dim=-1).float() / LARGEST
    numbers = x.float() / torch.where(scales > 0, scales, 1.0)[:, None]
    return numbers.clamp(-LARGEST, LARGEST).to(FLOAT8), scales


def shortlist_top(
    x: torch.Tensor, weight: torch.Tensor, weight8: torch.Tensor, scales: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The k largest numbers of every row of x times the weight's transpose, and their columns, of the columns that are
    likely to have them: a product in float8 says which one is best of every group of columns, and those of the best
    groups are computed in float32.

    Where one group has two of the k, or more groups than have candidates differ by less than float8 resolves, it may be
    other columns than the largest.

    Args:
        x: [bs, rows of each, K] bfloat16 or float16; columns contiguous; K is a multiple of DEPTH.
        weight: [N, K] of the same dtype, contiguous.
        weight8, scales: [N, K] and [N], `quantize_rows(weight)`, contiguous.
        k: at most as many as there are groups.

    Returns:
        logits: [bs * rows, k] float32, rounded to x's dtype, descending; -inf in place of NaN.
        columns: [bs * rows, k] int64; of equal numbers the first ones come first.
        log_sums: [bs * rows] float32, the logarithm of the sum of the exponentials of all numbers, in which those that
            were not candidates are as in float8. None where k is 1.
    """
    rows, num_columns, group = x.flatten(0, 1), weight.shape[0], group_size(k)
    rows8, row_scales = quantize_rows(rows)
    in_float8 = (rows8.float() @ weight8.float().T * scales * row_scales[:, None]).nan_to_num(nan=-torch.inf)
    padded = torch.nn.functional.pad(in_float8, (0, -num_columns % group), value=-torch.inf)
    best_of_groups, in_group = padded.unflatten(1, (-1, group)).max(dim=-1)
    groups = best_of_groups.topk(min(num_candidates(k), best_of_groups.shape[1])).indices
    candidates = (groups * group + in_group.gather(1, groups)).sort(dim=-1).values
    logits = (weight[candidates].float() * rows.float()[:, None]).sum(dim=-1).to(x.dtype).float()
    logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    # A stable sort keeps the order of equal values, which topk does not promise.
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    best = values[:, :k].contiguous(), candidates.gather(1, order)[:, :k].contiguous()
    if k == 1:
        return *best, None
    others = in_float8.scatter(1, candidates, -torch.inf)
    return *best, torch.cat((others, logits), dim=1).logsumexp(dim=-1)
