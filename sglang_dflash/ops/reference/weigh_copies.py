"""Copies of the request's own text in the table of conditional log probabilities, in torch."""

from __future__ import annotations

import torch

from sglang_dflash.ops.copies import weights


def weigh_copies(log_probs: torch.Tensor, ranks: torch.Tensor, places: torch.Tensor, lens: torch.Tensor) -> None:
    """Give the copy's tokens their probability, after the copy's token of the position before.

    With the weight w of :func:`sglang_dflash.ops.copies.weights`, the copy's token gets w + (1 - w) p, and every other
    candidate (1 - w) p. p is what the table has. All other rows stay. The changed rows are ordered anew.

    Args:
        log_probs: [bs, D, K, K] float32; changed.
        ranks: [bs, D, K, K] uint8; changed. Both as :func:`sglang_dflash.ops.reference.fill_table.fill_table` returns
            them.
        places, lens: of :func:`sglang_dflash.ops.reference.place_copies.place_copies`.
    """
    depths, k = log_probs.shape[1:3]
    if not log_probs.numel():
        return
    weight = weights(lens, depths)[..., None, None]
    rows = torch.arange(k, device=places.device)
    # All rows of the first position belong to the bonus token.
    is_row = (rows == places.roll(1, dims=1)[..., None]) | (torch.arange(depths, device=places.device) == 0)[:, None]
    is_row &= (places >= 0)[..., None]
    is_copy = ranks == places[..., None, None]
    copied = (weight + (1 - weight) * log_probs.exp()).log()
    changed, order = torch.where(is_copy, copied, log_probs + (1 - weight).log()).sort(
        dim=-1, descending=True, stable=True
    )
    log_probs.copy_(torch.where(is_row[..., None], changed, log_probs))
    ranks.copy_(torch.where(is_row[..., None], ranks.gather(-1, order), ranks))
