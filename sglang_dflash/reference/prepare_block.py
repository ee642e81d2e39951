"""The next block's tokens, positions and KV slots, in torch."""

from __future__ import annotations

import torch


def prepare_block(
    bonus_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    mask_token_id: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lay out `[bonus, mask x (B - 1)]` for every request.

    Args:
        bonus_tokens: [bs] int64, the last committed token, whose target KV does not exist yet.
        seq_lens: [bs] int64, committed tokens that have KV; the bonus token's position.
        req_pool_indices: [bs] int64, rows of `req_to_token`.
        req_to_token: [rows, width] int32, KV slot of every position of every request.

    Returns:
        block_ids: [bs, B] int64.
        positions: [bs, B] int64, `seq_lens .. seq_lens + B - 1`.
        out_cache_loc: [bs, B] int64, the KV slots of those positions.
    """
    bs = bonus_tokens.shape[0]
    block_ids = bonus_tokens.new_full((bs, block_size), mask_token_id)
    block_ids[:, 0] = bonus_tokens
    positions = seq_lens[:, None] + torch.arange(block_size, device=seq_lens.device)
    out_cache_loc = req_to_token[req_pool_indices[:, None], positions].to(torch.int64)
    return block_ids, positions, out_cache_loc
