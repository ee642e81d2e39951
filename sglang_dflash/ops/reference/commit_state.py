"""The recurrent states of the requests after an accepted prefix of their blocks, in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_dflash.ops.reference import delta_rule


@dataclass(frozen=True)
class States:
    """The states of Gated DeltaNet layers, in slots; slot 0 is for padding. L layers, S + 1 tokens of a convolution.

    Attributes:
        conv: [L, slots, C, S], the last inputs of the convolution.
        temporal: [L, slots, HV, V, K] float32, as in `ops.reference.delta_rule`.
    """

    conv: torch.Tensor
    temporal: torch.Tensor


@dataclass(frozen=True)
class BlockInputs:
    """What Gated DeltaNet layers computed of every token of a verified block, from which states are computed again.

    Row i is that of the i-th request of the batch, B tokens of a block.

    Attributes:
        conv: [L, rows, B, C, S], the state of the convolution after every token; may overlap in memory.
        key: [L, rows, B, H, K], before its norm.
        value: [L, rows, B, HV, V].
        log_decay: [L, rows, B, HV] float32.
        beta: [L, rows, B, HV] float32.
    """

    conv: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor


def commit_state(
    states: States,
    inputs: BlockInputs,
    slots: torch.Tensor,
    track_slots: torch.Tensor | None,
    seq_lens: torch.Tensor,
    accept_lens: torch.Tensor,
    interval: int,
) -> None:
    """Advance the states by the accepted tokens, and keep a copy of those after a multiple of `interval` tokens.

    The states are read where they are written: it cannot be called twice for a block.

    Args:
        states: written; `conv` is not read, as verification leaves in it what it was not given to keep.
        inputs: of the block.
        slots: [bs] int32, of the requests; 0 for padding, which is left alone.
        track_slots: [bs] int64, where the prefix cache finds the copy; 0 for requests without one, None without any.
        seq_lens: [bs] int64, tokens before the block.
        accept_lens: [bs] int32, at least 1.
        interval: at least the tokens of a block.
    """
    served = slots > 0
    rows = served.nonzero().flatten()
    slots, seq_lens, accept_lens = slots[rows].long(), seq_lens[rows], accept_lens[rows].long()
    boundaries = (seq_lens + accept_lens) // interval * interval
    # The token after which a copy is kept; -1 is none.
    track_steps = torch.where(boundaries > seq_lens, boundaries - seq_lens - 1, -1)
    if track_slots is not None:
        track_slots = track_slots[rows]
        track_steps = torch.where(track_slots > 0, track_steps, -1)
    temporal = states.temporal[:, slots]
    num_value_heads = temporal.shape[2]
    for step in range(int(accept_lens.max()) if len(rows) else 0):
        key = delta_rule.normalize(inputs.key[:, rows, step], num_value_heads)
        updated = delta_rule.update(
            temporal, key, inputs.value[:, rows, step], inputs.log_decay[:, rows, step], inputs.beta[:, rows, step]
        )
        temporal = torch.where((accept_lens > step)[:, None, None, None], updated, temporal)
        kept = (track_steps == step).nonzero().flatten()
        if track_slots is not None and len(kept):
            states.temporal[:, track_slots[kept]] = temporal[:, kept]
            states.conv[:, track_slots[kept]] = inputs.conv[:, rows[kept], step]
    states.temporal[:, slots] = temporal
    states.conv[:, slots] = inputs.conv[:, rows, accept_lens - 1]
