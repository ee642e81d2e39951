"""The gated delta rule over verified trees or chains, in torch."""

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
    ancestors: torch.Tensor,
    key_out: torch.Tensor,
    change_out: torch.Tensor,
    log_decay_out: torch.Tensor,
) -> torch.Tensor:
    """Return what N nodes of each of n requests read, and write what each adds to the state.

    A node comes after its ancestors. A chain is a tree in which every node sees all nodes before it. The heads of a
    token, and the numbers of a head, are contiguous in memory.

    Args:
        query: [n, N, H, K], before normalization.
        key: [n, N, H, K], before normalization.
        value: [n, N, HV, V].
        a: [n, N, HV].
        b: [n, N, HV].
        a_log: [HV].
        dt_bias: [HV].
        states: [slots, HV, V, K] float32, before the root. Not written.
        slots: [n] int32, of the requests.
        ancestors: [n, N] int64. Bit j of node i is set if node i sees node j; see :class:`sglang_dflash.types.Trees`.
            Requests with the same rows may share memory (stride 0).
        key_out: [>= n, >= N, H, K], written, as are the next two; see :class:`sglang_dflash.types.BlockInputs`.
        change_out: [>= n, >= N, HV, V] float32.
        log_decay_out: [>= n, >= N, HV] float32.

    Returns:
        [n, N, HV, V], the dtype of value.
    """
    n, width, num_value_heads = value.shape[:3]
    log_decay, beta = delta_rule.gates(a_log, a, dt_bias, b)
    key_out[:n, :width], log_decay_out[:n, :width] = key, log_decay
    key_lengths = delta_rule.for_value_heads(delta_rule.lengths(key), num_value_heads, dim=-1)
    query, key = (delta_rule.normalize(x, num_value_heads) for x in (query, key))
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    # The parent of a node is the highest of the nodes below its own number that it sees.
    number = torch.arange(width, device=key.device)
    is_ancestor = ((ancestors[..., None] >> number) & 1).bool() & (number < number[:, None])
    # 0: the state before the root; i + 1: the state after node i.
    before = torch.where(is_ancestor, number + 1, 0).amax(2)
    request = torch.arange(n, device=key.device)
    after = states.new_empty(width + 1, n, *states.shape[1:])
    after[0] = states[slots.long()]
    for node in range(width):
        state = after[before[:, node], request]
        change = delta_rule.change(state, key[:, node], value[:, node], log_decay[:, node], beta[:, node])
        after[node + 1] = delta_rule.put(state, key[:, node], change, log_decay[:, node])
        change_out[:n, node] = change / key_lengths[:, node, :, None]
        output[:, node] = delta_rule.read(after[node + 1], query[:, node])
    return output
