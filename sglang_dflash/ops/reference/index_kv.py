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
    """List the KV slots that blocks attend to: of each request its context, then its block.

    Args:
        req_to_token: [rows, width] int32, KV slot of every position of every request.
        req_pool_indices: [bs] int64, rows of it.
        seq_lens: [bs] int64, the context.
        window: only this many tokens of the context, the last ones; None: all.
        block_size: tokens behind the context.
        slot_map: [slots] int64, the slots of another pool; None: they stay as they are.
        kv_indptr: [bs + 1] int32, written: where the slots of each request begin.
        kv_indices: int32, its first `kv_indptr[-1]` entries are written.
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
