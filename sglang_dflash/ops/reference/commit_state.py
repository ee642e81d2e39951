"""The recurrent states of the requests after their accepted paths, in torch."""

from __future__ import annotations

import torch

from sglang_dflash.ops.reference import delta_rule
from sglang_dflash.types import BlockInputs, States, StateSlots


def commit_state(
    states: States,
    inputs: BlockInputs,
    slots: StateSlots,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    accept_lens: torch.Tensor,
    interval: int,
    is_due: torch.Tensor,
    paths: torch.Tensor,
) -> None:
    """Advance the states by the accepted tokens, and keep a copy of the states after a multiple of `interval` tokens.

    The states are read and written in place, so this is done once for each verification.

    Args:
        states: states before the root, written. After the call, states after the last accepted token.
        inputs: of the verified nodes.
        slots: of the requests. Requests in slot 0 are skipped, and nothing is kept in slot 0.
        req_pool_indices: [bs] int64, rows of `slots`.
        seq_lens: [bs] int64, tokens before the root.
        accept_lens: [bs] int64, at least 1.
        interval: tokens between two states that are kept. Not less than the largest accepted length.
        is_due: [1] int64. With 0 nothing is done.
        paths: [bs, W] int64, the nodes of the accepted paths; W is not less than any accepted length. Nodes after the
            accepted ones do not matter. Requests with the same path may share memory (stride 0).
    """
    if not is_due:
        return
    current = slots.current[req_pool_indices].long()
    rows = (current > 0).nonzero().flatten()
    current, req_pool_indices = current[rows], req_pool_indices[rows]
    seq_lens, accept_lens, paths = seq_lens[rows], accept_lens[rows], paths[rows]
    temporal = states.temporal[:, current]
    num_value_heads, num_places = temporal.shape[2], states.conv.shape[3]
    # From `conv[:, :, t]` on, the last inputs after t tokens: [L, n, S + W, C].
    on_paths = inputs.conv[:, rows[:, None], paths]
    conv = torch.cat([states.conv[:, current].transpose(2, 3), on_paths], dim=2)
    if slots.kept is None:
        kept = torch.zeros_like(current)
    else:
        turn = slots.turn[req_pool_indices] + (seq_lens + accept_lens) // interval
        kept = slots.kept[req_pool_indices, turn % slots.kept.shape[1]]
    # The number of tokens after which a copy is kept. None is kept if it is not between 1 and the accepted length.
    kept_lens = (seq_lens + accept_lens) // interval * interval - seq_lens
    for step in range(int(accept_lens.max()) if len(rows) else 0):
        node = paths[:, step]
        key = delta_rule.for_value_heads(inputs.key[:, rows, node].float(), num_value_heads, dim=-2)
        updated = delta_rule.put(temporal, key, inputs.change[:, rows, node], inputs.log_decay[:, rows, node])
        temporal = torch.where((accept_lens > step)[:, None, None, None], updated, temporal)
        last_inputs = conv[:, :, step + 1 : step + 1 + num_places].transpose(2, 3)
        for lens, into in ((accept_lens, current), (kept_lens, kept)):
            now = ((lens == step + 1) & (into > 0)).nonzero().flatten()
            states.temporal[:, into[now]] = temporal[:, now]
            states.conv[:, into[now]] = last_inputs[:, now]
