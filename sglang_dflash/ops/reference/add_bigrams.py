"""Update of bigram tables with the tokens of a cycle, in torch."""

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
    """Add the token pairs that a cycle committed to the tables of their requests.

    See :mod:`sglang_dflash.ops.bigrams`.

    Args:
        tables: [request slots, TABLE_SIZE] int16. Changed in place; slot 0 is for padding.
        req_pool_indices: [bs] int64. Request slots.
        first_tokens: [bs] int64. The last committed token before this cycle; may be strided.
        tokens: [bs, W] int64. Output tokens of the cycle.
        lens: [bs] int64. Output tokens that count, from the first.
        is_chain: [bs] int64. 1 for requests to leave out.
    """
    is_pair = (torch.arange(tokens.shape[1], device=tokens.device) < lens[:, None]) & (is_chain == 0)[:, None]
    before = torch.cat((first_tokens[:, None], tokens[:, :-1]), dim=1)
    tables[req_pool_indices] = put(tables[req_pool_indices], before, tokens, is_pair)
