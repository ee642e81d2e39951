"""Top-k of a matrix product by a shortlist in float8, in torch."""

from __future__ import annotations

import torch

from sglang_dflash.ops.scaled import scale_rows

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
# The depth of a product is a multiple of this.
DEPTH = 256
# Columns in a group, of which only the best is a candidate.
GROUP = 64


def num_candidates(k: int) -> int:
    """Return the number of columns to compute at full precision for the top k: a power of two."""
    return 2 << (k - 1).bit_length()


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to float8, each scaled so that its largest number is the dtype's largest.

    Args:
        x: [rows, depth] floating-point.

    Returns:
        numbers: [rows, depth] float8_e4m3fn.
        scales: [rows] float32. `numbers * scales` approximates x.
    """
    numbers, scales = scale_rows(x, LARGEST)
    return numbers.clamp(-LARGEST, LARGEST).to(FLOAT8), scales


def shortlist_top(
    x: torch.Tensor, weight: torch.Tensor, weight8: torch.Tensor, scales: torch.Tensor, k: int, has_sums: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the top k of every row of x times the transpose of the weight, with their columns.

    A product in float8 finds the best column of every group. The best groups' columns are computed in float32.

    The result is approximate in two cases. Two of the top k may be in one group. Or more groups than
    `num_candidates(k)` may differ by less than float8 resolves.

    Args:
        x: [bs, positions, depth] bfloat16 or float16. Columns are contiguous; depth is a multiple of DEPTH.
        weight: [columns, depth] of the same dtype, contiguous.
        weight8, scales: [columns, depth] and [columns]. `quantize_rows(weight)`, contiguous.
        k: at most the number of groups.
        has_sums: compute `log_sums`.

    Returns:
        logits: [bs * positions, k] float32, rounded to x's dtype, descending. -inf stands for NaN.
        columns: [bs * positions, k] int64. Of equal logits the lower column comes first.
        log_sums: [bs * positions] float32. Log-sum-exp of all columns; those that were no candidates count in float8.
            None without `has_sums`.
    """
    rows, num_columns = x.flatten(0, 1), weight.shape[0]
    rows8, row_scales = quantize_rows(rows)
    in_float8 = (rows8.float() @ weight8.float().T * scales * row_scales[:, None]).nan_to_num(nan=-torch.inf)
    padded = torch.nn.functional.pad(in_float8, (0, -num_columns % GROUP), value=-torch.inf)
    best_of_groups, in_group = padded.unflatten(1, (-1, GROUP)).max(dim=-1)
    groups = best_of_groups.topk(min(num_candidates(k), best_of_groups.shape[1])).indices
    candidates = (groups * GROUP + in_group.gather(1, groups)).sort(dim=-1).values
    logits = (weight[candidates].float() * rows.float()[:, None]).sum(dim=-1).to(x.dtype).float()
    logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    # A stable sort keeps the order of equal values. topk does not guarantee it.
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    best = values[:, :k].contiguous(), candidates.gather(1, order)[:, :k].contiguous()
    if not has_sums:
        return *best, None
    others = in_float8.scatter(1, candidates, -torch.inf)
    return *best, torch.cat((others, logits), dim=1).logsumexp(dim=-1)
