"""Tokens, positions and KV slots of the next block, in torch."""

from __future__ import annotations

import torch

from sglang_dflash.types import Block, DrawParameters


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
    """Write `[bonus, mask x (W - 1)]` of every request, and its sampling parameters, into the buffers of a cycle.

    Args:
        bonus_tokens: [bs] int64. The last committed token, which has no target KV yet.
        seq_lens: [bs] int64. Committed tokens that have KV.
        req_pool_indices: [bs] int64. Request slots.
        req_to_token: [request slots, positions] int32. KV slot of every position.
        mask_token_id: the drafter's mask token.
        parameters: of the bs requests; None if all are greedy.
        request_keys: [request slots] int64. Keys of the requests' noise.
        advances_states: whether the cycle advances recurrent states itself.
        is_chain: [bs] int64, see :class:`sglang_dflash.types.Block`; None stands for 0.
        block: written; may be padded to more than bs requests. Padding is a greedy request of one token in request
            slot 0 and KV slot 0, which SGLang reserves for padding.
    """
    bs, padded_bs = bonus_tokens.shape[0], block.seq_lens.shape[0]
    if padded_bs == 0:
        return
    rows = [tensor.view(padded_bs, -1) for tensor in (block.input_ids, block.positions, block.out_cache_loc)]
    block_ids, positions, out_cache_loc = rows
    block.req_pool_indices[:bs], block.req_pool_indices[bs:] = req_pool_indices, 0
    block.seq_lens[:bs], block.seq_lens[bs:] = seq_lens, 1
    block_ids.fill_(mask_token_id)
    block_ids[:bs, 0] = bonus_tokens
    torch.add(block.seq_lens[:, None], torch.arange(positions.shape[1], device=seq_lens.device), out=positions)
    out_cache_loc[:bs] = req_to_token[req_pool_indices[:, None], positions[:bs]]
    out_cache_loc[bs:] = 0
    block.keys.copy_(request_keys[block.req_pool_indices])
    block.advances_states.fill_(advances_states)
    block.is_chain.zero_()
    if is_chain is not None:
        block.is_chain[:bs] = is_chain
    for name, greedy in vars(DrawParameters.greedy(1, seq_lens.device)).items():
        values = getattr(block.parameters, name)
        values[:] = greedy
        if parameters is not None:
            values[:bs] = getattr(parameters, name)
