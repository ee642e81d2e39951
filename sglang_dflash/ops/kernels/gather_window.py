"""Page table of a drafter with a sliding window, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 1024


@triton.jit
def _gather_window_kernel(
    req_to_token,
    req_to_token_stride,
    req_pool_indices,
    seq_lens,
    window,
    page_size,
    block_size,
    out,
    out_stride,
    context_lens,
    TILE: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    seq_len = tl.load(seq_lens + request).to(tl.int64)
    start = tl.maximum(seq_len - window, 0) // page_size * page_size
    context_len = seq_len - start
    row = tl.load(req_pool_indices + request).to(tl.int64)
    column = tile * TILE + tl.arange(0, TILE)
    valid = column < context_len + block_size
    slot = tl.load(req_to_token + row * req_to_token_stride + start + column, mask=valid, other=0)
    tl.store(out + row * out_stride + column, slot, mask=valid)
    if tile == 0:
        tl.store(context_lens + request, context_len)


def gather_window(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    window: int,
    page_size: int,
    block_size: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """See :func:`sglang_dflash.ops.reference.gather_window.gather_window`."""
    bs = seq_lens.shape[0]
    context_lens = torch.empty(bs, dtype=torch.int64, device=seq_lens.device)
    if bs:
        _gather_window_kernel[(bs, triton.cdiv(window + page_size - 1 + block_size, _TILE))](
            req_to_token,
            req_to_token.stride(0),
            req_pool_indices,
            seq_lens,
            window,
            page_size,
            block_size,
            out,
            out.stride(0),
            context_lens,
            TILE=_TILE,
        )
    return context_lens
