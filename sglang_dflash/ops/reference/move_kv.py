"""Move of accepted keys and values to a chain's slots, in torch."""

from __future__ import annotations

import torch

from sglang_dflash.types import KVRows


def move_kv(
    rows: KVRows, slots: torch.Tensor, paths: torch.Tensor, accept_lens: torch.Tensor, slot_map: torch.Tensor | None
) -> None:
    """Copy the KV of the i-th node of every accepted path to the i-th slot of its request.

    Args:
        rows: the KV of all layers.
        slots: [bs, N] int64. KV slots of the nodes.
        paths: [bs, max_len] int64. Nodes in ascending order, the i-th at least i. The first `accept_lens` count.
        accept_lens: [bs] int64. Length of each path.
        slot_map: [KV slots] int64. Maps `slots` to the slots of `rows`; None if they are the same.
    """
    is_moved = torch.arange(paths.shape[1], device=paths.device) < accept_lens[:, None]
    sources, targets = slots.gather(1, paths)[is_moved], slots[:, : paths.shape[1]][is_moved]
    if slot_map is not None:
        sources, targets = slot_map[sources], slot_map[targets]
    for buffer in rows.buffers:
        buffer[targets] = buffer[sources]
