"""Keys and values of accepted paths, put where those of chains are, in torch."""

from __future__ import annotations

import torch

from sglang_dflash.types import KVRows


def move_kv(
    rows: KVRows, slots: torch.Tensor, paths: torch.Tensor, accept_lens: torch.Tensor, slot_map: torch.Tensor | None
) -> None:
    """Copy the KV of the i-th node of every accepted path to the i-th slot of its request.

    Args:
        rows: of all layers.
        slots: [bs, N] int64, of a request's nodes.
        paths: [bs, L] int64, ascending nodes; of each the first `accept_lens` matter, and the i-th is i or more.
        accept_lens: [bs] int64.
        slot_map: [slots] int64, from those to the slots of `rows`; None: they are the same.
    """
    is_moved = torch.arange(paths.shape[1], device=paths.device) < accept_lens[:, None]
    sources, targets = slots.gather(1, paths)[is_moved], slots[:, : paths.shape[1]][is_moved]
    if slot_map is not None:
        sources, targets = slot_map[sources], slot_map[targets]
    for buffer in rows.buffers:
        buffer[targets] = buffer[sources]
