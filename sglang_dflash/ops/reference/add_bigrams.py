"""Update of bigram tables and texts with the tokens of a cycle, in torch."""

from __future__ import annotations

import torch

from sglang_dflash.ops.bigrams import put
from sglang_dflash.ops.reference.write_texts import write_texts


def add_bigrams(
    tables: torch.Tensor,
    req_pool_indices: torch.Tensor,
    first_tokens: torch.Tensor,
    tokens: torch.Tensor,
    lens: torch.Tensor,
    is_chain: torch.Tensor,
    texts: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
) -> None:
    """Add the tokens that a cycle committed to the texts of their requests, and their pairs to the tables.

    See :mod:`sglang_dflash.ops.bigrams` and :mod:`sglang_dflash.ops.copies`.

    Args:
        tables: [request slots, TABLE_SIZE] int16. Changed in place; slot 0 is for padding.
        req_pool_indices: [bs] int64. Request slots.
        first_tokens: [bs] int64. The last committed token before this cycle; may be strided.
        tokens: [bs, W] int64. Output tokens of the cycle.
        lens: [bs] int64. Output tokens that count, from the first.
        is_chain: [bs] int64. 1 for requests to leave out.
        texts: of :func:`sglang_dflash.ops.reference.write_texts.write_texts`. None: there are none.
        seq_lens: [bs] int64, contiguous. Positions of `first_tokens`. None where `texts` is.
    """
    is_pair = (torch.arange(tokens.shape[1], device=tokens.device) < lens[:, None]) & (is_chain == 0)[:, None]
    before = torch.cat((first_tokens[:, None], tokens[:, :-1]), dim=1)
    tables[req_pool_indices] = put(tables[req_pool_indices], before, tokens, is_pair)
    if texts is not None:
        write_texts(texts, req_pool_indices, seq_lens + 1, tokens, lens, is_chain)
