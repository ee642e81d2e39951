"""Acceptance of a path of a drafted tree, in torch."""

from __future__ import annotations

import torch

from sglang_dflash.verify.acceptance import Acceptance


def accept_paths(
    tokens: torch.Tensor, parents: torch.Tensor, target_tokens: torch.Tensor, seq_lens: torch.Tensor, max_len: int
) -> tuple[Acceptance, torch.Tensor]:
    """From the root on, the nodes that hold the target's token after the one before, then the bonus token.

    No two nodes behind the same one hold the same token. What the target chooses after a node depends on the tokens of
    its path alone, so the text has the target's distribution, drawn or not (`accept_prefix`).

    Args:
        tokens: [bs, N] int64, of the nodes; see :class:`sglang_dflash.types.Trees`.
        parents: [bs, N] int64.
        target_tokens: [bs, N] int64, the target's token after each: its argmax, or one drawn from its distribution.
        seq_lens: [bs] int64, committed tokens before the root.
        max_len: L, of a path, the root included; none is longer.

    Returns:
        :class:`Acceptance` of L tokens a request; output tokens behind the bonus token are 0.
        [bs, L] int64, the nodes of the accepted paths; behind them the places themselves, as all of a chain's are.
    """
    bs = tokens.shape[0]
    accepted = Acceptance.empty(bs, max_len, tokens.device)
    accepted.out_tokens.zero_()
    paths = torch.empty((bs, max_len), dtype=torch.int64, device=tokens.device)
    node = torch.zeros(bs, dtype=torch.int64, device=tokens.device)
    goes_on = torch.ones(bs, dtype=torch.bool, device=tokens.device)
    accepted.accept_lens.zero_()
    for place in range(max_len):
        paths[:, place] = torch.where(goes_on, node, place)
        chosen = target_tokens.gather(1, node[:, None])
        accepted.out_tokens[:, place] = torch.where(goes_on, chosen[:, 0], 0)
        accepted.bonus_tokens.copy_(torch.where(goes_on, chosen[:, 0], accepted.bonus_tokens))
        accepted.accept_lens.add_(goes_on)
        is_next = (parents == node[:, None]) & (tokens == chosen)
        goes_on = goes_on & is_next.any(dim=1)
        node = torch.where(goes_on, is_next.to(torch.int64).argmax(dim=1), node)
    accepted.new_seq_lens.copy_(seq_lens + accepted.accept_lens)
    return accepted, paths
