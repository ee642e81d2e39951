"""Tokens, positions and KV slots of the next block, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.types import Block, DrawParameters


# These arguments change with the batch or with every launch. Specialising on them would recompile the kernel while all
# running requests wait.
@triton.jit(do_not_specialize=["bs", "num_drawn", "num_told", "advances_states"])
def _prepare_block_kernel(
    bonus_tokens,
    seq_lens,
    req_pool_indices,
    bs,
    req_to_token,
    req_to_token_stride,
    mask_token_id,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    num_drawn,
    is_chain,
    num_told,
    request_keys,
    advances_states,
    block_ids,
    positions,
    out_cache_loc,
    block_req_pool_indices,
    block_seq_lens,
    block_temperatures,
    block_top_ks,
    block_top_ps,
    block_min_ps,
    block_keys,
    block_advances_states,
    block_is_chain,
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
    tl.store(block_keys + request, tl.load(request_keys + req_pool_index))
    is_drawn = request < num_drawn
    tl.store(block_temperatures + request, tl.load(temperatures + request, mask=is_drawn, other=1.0))
    tl.store(block_top_ks + request, tl.load(top_ks + request, mask=is_drawn, other=1))
    tl.store(block_top_ps + request, tl.load(top_ps + request, mask=is_drawn, other=1.0))
    tl.store(block_min_ps + request, tl.load(min_ps + request, mask=is_drawn, other=0.0))
    tl.store(block_is_chain + request, tl.load(is_chain + request, mask=request < num_told, other=0))
    if request == 0:
        tl.store(block_advances_states, advances_states.to(tl.int64))


def prepare_block(
    bonus_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    mask_token_id: int,
    parameters: DrawParameters | None,
    request_keys: torch.Tensor,
    advances_states: bool,
    is_chain: torch.Tensor | None,
    block: Block,
) -> None:
    """See :func:`sglang_dflash.ops.reference.prepare_block.prepare_block`."""
    padded_bs = block.seq_lens.shape[0]
    if padded_bs == 0:
        return
    block_size = block.input_ids.shape[0] // padded_bs
    bs = bonus_tokens.shape[0]
    # Masked off when no request is sampled or verifies a chain; any valid pointer will do.
    source = block.parameters if parameters is None else parameters
    _prepare_block_kernel[(padded_bs,)](
        bonus_tokens,
        seq_lens,
        req_pool_indices,
        bs,
        req_to_token,
        req_to_token.stride(0),
        mask_token_id,
        source.temperatures,
        source.top_ks,
        source.top_ps,
        source.min_ps,
        0 if parameters is None else bs,
        block.is_chain if is_chain is None else is_chain,
        0 if is_chain is None else bs,
        request_keys,
        int(advances_states),
        block.input_ids,
        block.positions,
        block.out_cache_loc,
        block.req_pool_indices,
        block.seq_lens,
        block.parameters.temperatures,
        block.parameters.top_ks,
        block.parameters.top_ps,
        block.parameters.min_ps,
        block.keys,
        block.advances_states,
        block.is_chain,
        BLOCK_SIZE=block_size,
        PADDED=triton.next_power_of_2(block_size),
        num_warps=1,
    )
