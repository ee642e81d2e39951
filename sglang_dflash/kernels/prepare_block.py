"""The next block's tokens, positions and KV slots, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.reference.prepare_block import Block


@triton.jit
def _prepare_block_kernel(
    bonus_tokens,
    seq_lens,
    req_pool_indices,
    bs,
    req_to_token,
    req_to_token_stride,
    mask_token_id,
    block_ids,
    positions,
    out_cache_loc,
    block_req_pool_indices,
    block_seq_lens,
    BLOCK_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    is_request = request < bs
    seq_len = tl.load(seq_lens + request, mask=is_request, other=1).to(tl.int64)
    req_pool_index = tl.load(req_pool_indices + request, mask=is_request, other=0).to(tl.int64)
    bonus = tl.load(bonus_tokens + request, mask=is_request, other=mask_token_id)
    row = tl.arange(0, PADDED)
    valid = row < BLOCK_SIZE
    position = seq_len + row
    table = req_to_token + req_pool_index * req_to_token_stride
    slot = tl.load(table + position, mask=valid & is_request, other=0).to(tl.int64)
    out = request * BLOCK_SIZE + row
    tl.store(block_ids + out, tl.where(row == 0, bonus, mask_token_id), mask=valid)
    tl.store(positions + out, position, mask=valid)
    tl.store(out_cache_loc + out, slot, mask=valid)
    tl.store(block_req_pool_indices + request, req_pool_index)
    tl.store(block_seq_lens + request, seq_len)


def prepare_block(
    bonus_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    mask_token_id: int,
    block: Block,
) -> None:
    """See :func:`sglang_dflash.reference.prepare_block.prepare_block`."""
    padded_bs = block.seq_lens.shape[0]
    if padded_bs == 0:
        return
    block_size = block.input_ids.shape[0] // padded_bs
    _prepare_block_kernel[(padded_bs,)](
        bonus_tokens,
        seq_lens,
        req_pool_indices,
        bonus_tokens.shape[0],
        req_to_token,
        req_to_token.stride(0),
        mask_token_id,
        block.input_ids,
        block.positions,
        block.out_cache_loc,
        block.req_pool_indices,
        block.seq_lens,
        BLOCK_SIZE=block_size,
        PADDED=triton.next_power_of_2(block_size),
        num_warps=1,
    )
