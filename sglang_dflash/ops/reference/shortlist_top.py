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


def spread(num_columns: int, device: torch.device) -> torch.Tensor:
    """Return the columns in the order of the copy, [groups * GROUP] int64: those of the first group, of the next, ...

    The best tokens of a position are often neighbours in the vocabulary, as frequent tokens are, or a word in two
    cases. Only one token of a group is a candidate. So a group takes every n-th column, where n is the number of
    groups. In place of columns after the end there is the last one.
    """
    num_groups = -(-num_columns // GROUP)
    in_order = torch.arange(num_groups * GROUP, device=device).view(GROUP, num_groups).T.flatten()
    return in_order.clamp(max=num_columns - 1)


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
        weight8, scales: [groups * GROUP, depth] and [groups * GROUP]. `quantize_rows` of the columns in the order of
            `spread`, contiguous.
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
    in_order = (rows8.float() @ weight8.float().T * scales * row_scales[:, None]).nan_to_num(nan=-torch.inf)
    num_groups = len(weight8) // GROUP
    in_float8 = in_order.unflatten(1, (num_groups, GROUP)).mT.flatten(1)[:, :num_columns]
    padded = torch.nn.functional.pad(in_float8, (0, len(weight8) - num_columns), value=-torch.inf)
    best_of_groups, in_group = padded.unflatten(1, (GROUP, num_groups)).max(dim=1)
    groups = best_of_groups.topk(min(num_candidates(k), num_groups)).indices
    candidates = (in_group.gather(1, groups) * num_groups + groups).sort(dim=-1).values
    logits = (weight[candidates].float() * rows.float()[:, None]).sum(dim=-1).to(x.dtype).float()
    logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    # A stable sort keeps the order of equal values. topk does not guarantee it.
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    best = values[:, :k].contiguous(), candidates.gather(1, order)[:, :k].contiguous()
    if not has_sums:
        return *best, None
    others = in_float8.scatter(1, candidates, -torch.inf)
    return *best, torch.cat((others, logits), dim=1).logsumexp(dim=-1)
