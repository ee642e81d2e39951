"""Pairs of tokens that texts have before they are continued, in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_dflash.ops.bigrams import tables_of


def begin_bigrams(
    tables: torch.Tensor, req_pool_indices: torch.Tensor, texts: torch.Tensor, next_tokens: torch.Tensor
) -> None:
    """Begin the tables of requests anew; see :mod:`sglang_dflash.ops.bigrams`.

    Args:
        tables: [rows, TABLE_SIZE] int16, changed in place.
        req_pool_indices: [n] int64, the row of each request; no two have the same.
        texts: [n, 1 + L] int32, how many tokens each text has, and they; L at most TABLE_SIZE.
        next_tokens: [n] integers, one more token of each.
    """
    lens = texts[:, :1].to(torch.int64)
    tokens = F.pad(texts[:, 1:].to(torch.int64), (0, 1)).scatter(1, lens, next_tokens[:, None].to(torch.int64))
    tables[req_pool_indices] = tables_of(tokens, lens[:, 0] + 1)
