"""Acceptance of a path of a draft tree, in torch."""

from __future__ import annotations

import torch

from sglang_dflash.types import Acceptance


def accept_paths(
    tokens: torch.Tensor, parents: torch.Tensor, target_tokens: torch.Tensor, seq_lens: torch.Tensor, max_len: int
) -> tuple[Acceptance, torch.Tensor]:
    """Accept, from the root on, each node that holds the target's token after its parent; then add the bonus token.

    Children of one node hold different tokens. The target's token after a node depends on the node's path alone.
    So sampled output has the target's distribution, and greedy output is the target's (see `accept_prefix`).

    Args:
        tokens: [bs, N] int64. Tokens of the nodes; see :class:`sglang_dflash.types.Trees`.
        parents: [bs, N] int64. Parent of each node; -1 for the root and for padding.
        target_tokens: [bs, N] int64. The target's token after each node: its argmax, or a sample.
        seq_lens: [bs] int64. Committed tokens before the root.
        max_len: length of the longest possible path, with the root.

    Returns:
        :class:`Acceptance` of `max_len` tokens per request. Output tokens after the bonus token are 0.
        paths: [bs, max_len] int64. Accepted nodes. Entries after the path hold their own index, as in a chain.
    """
    bs = tokens.shape[0]
    accepted = Acceptance.empty(bs, max_len, tokens.device)
    accepted.out_tokens.zero_()
    paths = torch.empty((bs, max_len), dtype=torch.int64, device=tokens.device)
    node = torch.zeros(bs, dtype=torch.int64, device=tokens.device)
    goes_on = torch.ones(bs, dtype=torch.bool, device=tokens.device)
    accepted.accept_lens.zero_()
    for index in range(max_len):
        paths[:, index] = torch.where(goes_on, node, index)
        chosen = target_tokens.gather(1, node[:, None])
        accepted.out_tokens[:, index] = torch.where(goes_on, chosen[:, 0], 0)
        accepted.bonus_tokens.copy_(torch.where(goes_on, chosen[:, 0], accepted.bonus_tokens))
        accepted.accept_lens.add_(goes_on)
        is_next = (parents == node[:, None]) & (tokens == chosen)
        goes_on = goes_on & is_next.any(dim=1)
        node = torch.where(goes_on, is_next.to(torch.int64).argmax(dim=1), node)
    accepted.new_seq_lens.copy_(seq_lens + accepted.accept_lens)
    return accepted, paths
