"""The recurrent states of the requests after an accepted prefix of their blocks, in torch."""

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
) -> None:
    """Advance the states by the accepted tokens, and keep a copy of those after a multiple of `interval` tokens.

    The states are read where they are written: it cannot be done twice for a block.

    Args:
        states: written; `conv` is not read, as verification leaves in it what it was not given to keep.
        inputs: of the block.
        slots: of the requests; those in slot 0 are left alone, and nothing is kept in slot 0.
        req_pool_indices: [bs] int64, rows of `slots`.
        seq_lens: [bs] int64, tokens before the block.
        accept_lens: [bs] int64, at least 1.
        interval: at least the tokens of a block.
        is_due: [1] int64; with 0 nothing is done.
    """
    if not is_due:
        return
    current = slots.current[req_pool_indices].long()
    rows = (current > 0).nonzero().flatten()
    current, req_pool_indices = current[rows], req_pool_indices[rows]
    seq_lens, accept_lens = seq_lens[rows], accept_lens[rows]
    temporal = states.temporal[:, current]
    num_value_heads = temporal.shape[2]
    if slots.kept is None:
        kept = torch.zeros_like(current)
    else:
        turn = slots.turn[req_pool_indices] + (seq_lens + accept_lens) // interval
        kept = slots.kept[req_pool_indices, turn % slots.kept.shape[1]]
    # The token after which a copy is kept; none, if it is not among the accepted ones.
    kept_steps = (seq_lens + accept_lens) // interval * interval - seq_lens - 1
    for step in range(int(accept_lens.max()) if len(rows) else 0):
        key = delta_rule.for_value_heads(inputs.key[:, rows, step].float(), num_value_heads, dim=-2)
        updated = delta_rule.put(temporal, key, inputs.change[:, rows, step], inputs.log_decay[:, rows, step])
        temporal = torch.where((accept_lens > step)[:, None, None, None], updated, temporal)
        kept_now = ((kept_steps == step) & (kept > 0)).nonzero().flatten()
        states.temporal[:, kept[kept_now]] = temporal[:, kept_now]
        states.conv[:, kept[kept_now]] = inputs.conv[:, rows[kept_now], step]
    states.temporal[:, current] = temporal
    states.conv[:, current] = inputs.conv[:, rows, accept_lens - 1]
