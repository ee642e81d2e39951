"""FlashInfer's list of KV slots, in torch."""

from __future__ import annotations

import torch


def index_kv(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    window: int | None,
    block_size: int,
    slot_map: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
) -> None:
    """List the KV slots that blocks attend to: each request's context, then its block.

    Args:
        req_to_token: [request slots, positions] int32. KV slot of every position.
        req_pool_indices: [bs] int64. Request slots.
        seq_lens: [bs] int64. Context tokens.
        window: number of last context tokens to list; None lists all.
        block_size: W. Tokens after the context.
        slot_map: [KV slots] int64. The slots of another pool; None keeps the slots.
        kv_indptr: [bs + 1] int32, written. Start of each request's slots in `kv_indices`.
        kv_indices: int32. The first `kv_indptr[-1]` entries are written.
    """
    kv_indptr[0] = 0
    for i, (row, seq_len) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        first = 0 if window is None else max(0, seq_len - window)
        slots = req_to_token[row, first : seq_len + block_size]
        if slot_map is not None:
            slots = slot_map[slots.long()]
        begin = int(kv_indptr[i])
        kv_indptr[i + 1] = begin + len(slots)
        kv_indices[begin : begin + len(slots)] = slots
