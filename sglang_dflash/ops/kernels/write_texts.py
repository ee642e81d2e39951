"""Texts of running requests, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sglang_dflash.ops.kernels import pdl

_MOST_TOKENS = 1024


@triton.jit
def _write_texts_kernel(
    texts,
    req_pool_indices,
    starts,
    tokens,
    tokens_stride,
    lens,
    is_chain,
    width,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    # It does not let the next kernel begin early, see `place_copies`.
    if PDL:
        gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_token = (index < width) & (index < tl.load(lens + request)) & (tl.load(is_chain + request) == 0)
    token = tl.load(tokens + request * tokens_stride + index, mask=is_token, other=0)
    row = tl.load(req_pool_indices + request).to(tl.int64)
    place = (tl.load(starts + request).to(tl.int64) + index) & (SIZE - 1)
    tl.store(texts + row * SIZE + place, token.to(tl.int32), mask=is_token)


def write_texts(
    texts: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    tokens: torch.Tensor,
    lens: torch.Tensor,
    is_chain: torch.Tensor,
) -> None:
    """See :func:`sglang_dflash.ops.reference.write_texts.write_texts`."""
    bs, width = tokens.shape
    size = texts.shape[1]
    assert size & (size - 1) == 0 and texts.is_contiguous() and tokens.stride(1) == 1
    assert starts.is_contiguous() and lens.is_contiguous()
    if bs and width:
        num_tokens = min(triton.next_power_of_2(width), _MOST_TOKENS)
        pdl_is_available = pdl.is_available(tokens.device)
        _write_texts_kernel[(bs, triton.cdiv(width, num_tokens))](
            texts,
            req_pool_indices,
            starts,
            tokens,
            tokens.stride(0),
            lens,
            is_chain,
            width,
            SIZE=size,
            TOKENS=num_tokens,
            PDL=pdl_is_available,
            num_warps=4 if num_tokens > 128 else 1,
            launch_pdl=pdl_is_available,
        )
