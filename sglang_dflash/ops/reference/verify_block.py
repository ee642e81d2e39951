"""A verified block through the gated delta rule, in torch."""

from __future__ import annotations

import torch

from sglang_dflash.ops.reference import delta_rule


def verify_block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    key_out: torch.Tensor,
    change_out: torch.Tensor,
    log_decay_out: torch.Tensor,
) -> torch.Tensor:
    """What W tokens of each of n requests find in the state after them, and what they put into it.

    Heads, and the numbers of a head, lie beside each other in memory.

    Args:
        query: [n, W, H, K], before its norm.
        key: [n, W, H, K], before its norm.
        value: [n, W, HV, V].
        a: [n, W, HV].
        b: [n, W, HV].
        a_log: [HV].
        dt_bias: [HV].
        states: [slots, HV, V, K] float32, before the block, left alone.
        slots: [n] int32, of the requests.
        key_out: [>= n, >= W, H, K], written, as those that follow: see `types.BlockInputs`.
        change_out: [>= n, >= W, HV, V] float32.
        log_decay_out: [>= n, >= W, HV] float32.

    Returns:
        [n, W, HV, V], the dtype of value.
    """
    n, width, num_value_heads = value.shape[:3]
    log_decay, beta = delta_rule.gates(a_log, a, dt_bias, b)
    key_out[:n, :width], log_decay_out[:n, :width] = key, log_decay
    key_lengths = delta_rule.for_value_heads(delta_rule.lengths(key), num_value_heads, dim=-1)
    query, key = (delta_rule.normalize(x, num_value_heads) for x in (query, key))
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    state = states[slots.long()]
    for step in range(width):
        change = delta_rule.change(state, key[:, step], value[:, step], log_decay[:, step], beta[:, step])
        state = delta_rule.put(state, key[:, step], change, log_decay[:, step])
        change_out[:n, step] = change / key_lengths[:, step, :, None]
        output[:, step] = delta_rule.read(state, query[:, step])
    return output
