"""The next block's tokens, positions and KV slots, in torch."""

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
    seed: int,
    is_plain: bool,
    is_chain: torch.Tensor | None,
    block: Block,
) -> None:
    """Lay out `[bonus, mask x (B - 1)]` for every request, and how its tokens are to be drawn.

    Args:
        bonus_tokens: [bs] int64, the last committed token, whose target KV does not exist yet.
        seq_lens: [bs] int64.
        req_pool_indices: [bs] int64.
        req_to_token: [rows, width] int32, KV slot of every position of every request.
        parameters: of the bs requests; None: all are greedy.
        seed: of the cycle, below 2**63.
        is_plain: whether all requests are accepted by the plain rule.
        is_chain: [bs] int64, of :class:`sglang_dflash.types.Block`; None: 0 for all.
        block: written, of P >= bs requests; those behind the first bs become greedy requests of one token, in row 0 of
            `req_to_token` and slot 0 of the KV, which SGLang keeps for padding.
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
    block.seed.fill_(seed)
    block.is_plain.fill_(is_plain)
    block.is_chain.zero_()
    if is_chain is not None:
        block.is_chain[:bs] = is_chain
    for name, greedy in vars(DrawParameters.greedy(1, seq_lens.device)).items():
        values = getattr(block.parameters, name)
        values[:] = greedy
        if parameters is not None:
            values[:bs] = getattr(parameters, name)
