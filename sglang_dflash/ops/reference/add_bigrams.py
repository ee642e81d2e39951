"""Pairs of tokens that a cycle committed, in torch."""

from __future__ import annotations

import torch

from sglang_dflash.ops.bigrams import put


def add_bigrams(
    tables: torch.Tensor,
    req_pool_indices: torch.Tensor,
    first_tokens: torch.Tensor,
    tokens: torch.Tensor,
    lens: torch.Tensor,
    is_chain: torch.Tensor,
) -> None:
    """Put what requests wrote into their tables; see :mod:`sglang_dflash.ops.bigrams`.

    Args:
        tables: [rows, TABLE_SIZE] int16, changed in place. Row 0 is for padding.
        req_pool_indices: [bs] int64, the row of each request.
        first_tokens: [bs] int64, the last tokens before; may be strided.
        tokens: [bs, W] int64, of which the first `lens` follow.
        lens: [bs] int64.
        is_chain: [bs] int64, 1 for requests that are left out.
    """
    is_pair = (torch.arange(tokens.shape[1], device=tokens.device) < lens[:, None]) & (is_chain == 0)[:, None]
    before = torch.cat((first_tokens[:, None], tokens[:, :-1]), dim=1)
    tables[req_pool_indices] = put(tables[req_pool_indices], before, tokens, is_pair)
