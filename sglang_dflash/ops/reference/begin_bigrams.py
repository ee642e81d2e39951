"""Bigram tables of prompts, in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_dflash.ops.bigrams import tables_of


def begin_bigrams(
    tables: torch.Tensor, req_pool_indices: torch.Tensor, texts: torch.Tensor, next_tokens: torch.Tensor
) -> None:
    """Rebuild the tables of requests from their texts; see :mod:`sglang_dflash.ops.bigrams`.

    Args:
        tables: [request slots, TABLE_SIZE] int16. Changed in place.
        req_pool_indices: [bs] int64. Request slots, all different.
        texts: [bs, 1 + T] int32. The length of each text, then its tokens; T at most TABLE_SIZE.
        next_tokens: [bs] integers. One more token after each text.
    """
    lens = texts[:, :1].to(torch.int64)
    tokens = F.pad(texts[:, 1:].to(torch.int64), (0, 1)).scatter(1, lens, next_tokens[:, None].to(torch.int64))
    tables[req_pool_indices] = tables_of(tokens, lens[:, 0] + 1)
