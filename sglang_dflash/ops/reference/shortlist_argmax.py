"""The best column of a product for every row by a shortlist in float8, in torch."""

from __future__ import annotations

import torch

# Of each tile of columns the best is known, of those so many are computed as they are.
TILE, CANDIDATES = 128, 8
# Rows have a multiple of so many numbers.
DEPTH = 256
FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max


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


def shortlist_argmax(
    x: torch.Tensor, weight: torch.Tensor, weight8: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest number of every row of x times the weight's transpose, and the first column that has it, of the
    columns that are likely to: a product in float8 says which one is best of every tile, and those of the best tiles
    are computed in float32.

    Where two columns of one tile, or more tiles than are on the shortlist, differ by less than float8 resolves, it may
    be another column than the largest.

    Args:
        x: [bs, rows of each, K] bfloat16 or float16; columns contiguous; K is a multiple of DEPTH.
        weight: [N, K] of the same dtype, contiguous.
        weight8, scales: [N, K] and [N], `quantize_rows(weight)`, contiguous.

    Returns:
        maxima: [bs * rows], of x's dtype; -inf where a row has only NaN.
        columns: [bs * rows] int64.
    """
    rows, num_columns = x.flatten(0, 1), weight.shape[0]
    rows8, _ = quantize_rows(rows)
    shortlist = (rows8.float() @ weight8.float().T * scales).nan_to_num(nan=-torch.inf)
    missing = -num_columns % TILE
    padded = torch.nn.functional.pad(shortlist, (0, missing), value=-torch.inf)
    best_of_tiles, in_tile = padded.unflatten(1, (-1, TILE)).max(dim=-1)
    tiles = best_of_tiles.topk(min(CANDIDATES, best_of_tiles.shape[1])).indices
    columns = tiles * TILE + in_tile.gather(1, tiles)
    logits = (weight[columns].float() * rows.float()[:, None]).sum(dim=-1).to(x.dtype)
    logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    maxima = logits.amax(dim=-1)
    return maxima, columns.where(logits == maxima[:, None], num_columns).amin(dim=-1)
