"""Texts of running requests, in torch."""

from __future__ import annotations

import torch


def write_texts(
    texts: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    tokens: torch.Tensor,
    lens: torch.Tensor,
    is_chain: torch.Tensor,
) -> None:
    """Write tokens to the texts of their requests; see :mod:`sglang_dflash.ops.copies`.

    Args:
        texts: [request slots, S] int32, S a power of two. Changed in place; slot 0 is for padding. The token at
            position p is at p % S.
        req_pool_indices: [bs] int64. Request slots, all different but for padding.
        starts: [bs] integers, contiguous. Position of the first token.
        tokens: [bs, T] integers; T at most S. The rows may be strided.
        lens: [bs] integers, contiguous. Tokens that count, from the first.
        is_chain: [bs] int64. 1 for requests to leave out.
    """
    # As on a GPU.
    assert starts.is_contiguous() and lens.is_contiguous()
    index = torch.arange(tokens.shape[1], device=tokens.device)
    request, column = ((index < lens[:, None]) & (is_chain == 0)[:, None]).nonzero(as_tuple=True)
    places = (starts[request].to(torch.int64) + column) % texts.shape[1]
    texts[req_pool_indices[request], places] = tokens[request, column].to(texts.dtype)
