"""The next block's tokens, positions and KV slots, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _prepare_block_kernel(
    bonus_tokens,
    seq_lens,
    req_pool_indices,
    req_to_token,
    req_to_token_stride,
    mask_token_id,
    block_ids,
    positions,
    out_cache_loc,
    BLOCK_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, PADDED)
    valid = row < BLOCK_SIZE
    position = tl.load(seq_lens + request).to(tl.int64) + row
    table = req_to_token + tl.load(req_pool_indices + request).to(tl.int64) * req_to_token_stride
    slot = tl.load(table + position, mask=valid, other=0).to(tl.int64)
    token = tl.where(row == 0, tl.load(bonus_tokens + request), mask_token_id)
    out = request * BLOCK_SIZE + row
    tl.store(block_ids + out, token, mask=valid)
    tl.store(positions + out, position, mask=valid)
    tl.store(out_cache_loc + out, slot, mask=valid)


def prepare_block(
    bonus_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    mask_token_id: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`sglang_dflash.reference.prepare_block.prepare_block`."""
    bs = bonus_tokens.shape[0]
    block_ids, positions, out_cache_loc = torch.empty(
        (3, bs, block_size), dtype=torch.int64, device=bonus_tokens.device
    ).unbind()
    if bs:
        _prepare_block_kernel[(bs,)](
            bonus_tokens,
            seq_lens,
            req_pool_indices,
            req_to_token,
            req_to_token.stride(0),
            mask_token_id,
            block_ids,
            positions,
            out_cache_loc,
            BLOCK_SIZE=block_size,
            PADDED=triton.next_power_of_2(block_size),
            num_warps=1,
        )
    return block_ids, positions, out_cache_loc
