"""The operators of `sgl_kernel` that SGLang's Gated DeltaNet models call on a CPU, in torch.

:func:`sglang_dflash_cpu.platform.activate` installs this module as `sgl_kernel.mamba`. Its import also registers half
of these operators in `torch.ops.sgl_kernel`, where SGLang's models read them when they are imported. Names, arguments
and in-place outputs are those of `sgl_kernel`'s CPU build; each function names the Triton kernel of SGLang whose result
it gives. As this module is imported with torch, only its functions import `sglang_dflash`.

Shapes: T tokens of n sequences, C channels of a convolution over S + 1 tokens; otherwise as in
`ops.reference.delta_rule`. Recurrent states are float32, [slots, HV, V, K]; states of convolutions are a channel's last
S inputs, [slots, C, S].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

# `FLA_CHUNK_SIZE` of SGLang: a prefill returns the state before every chunk of this many tokens.
CHUNK_SIZE = 64


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: list[int],
    cache_indices: Tensor,
    has_initial_state: Tensor,
    activation: str | None,
) -> Tensor:
    """Convolution of sequences of any length, as `kernels.ops.mamba.causal_conv1d_triton.causal_conv1d_fn`.

    Args:
        x: [C, T], sequence after sequence.
        weight: [C, S + 1].
        bias: [C] or None.
        conv_states: [slots, C, S], read where there is an initial state, and written.
        query_start_loc: [n + 1], where each sequence begins, and T.
        seq_lens_cpu: [n], the same lengths.
        cache_indices: [n], slots.
        has_initial_state: [n] bool; without one a sequence begins after zeros.
        activation: "silu", "swish" or None.

    Returns:
        [C, T]
    """
    outputs = []
    starts = query_start_loc.tolist()
    for i, slot in enumerate(cache_indices.tolist()):
        before = conv_states[slot] if has_initial_state[i] else torch.zeros_like(conv_states[slot])
        inputs = torch.cat([before.to(x.dtype), x[:, starts[i] : starts[i + 1]]], dim=1)
        outputs.append(_convolve(inputs[None], weight, bias, activation)[0])
        conv_states[slot] = inputs[:, -conv_states.shape[-1] :].to(conv_states.dtype)
    return torch.cat(outputs, dim=1)


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_state_indices: Tensor,
) -> Tensor:
    """Convolution of one token of each sequence, as
    `kernels.ops.mamba.causal_conv1d_triton.causal_conv1d_update` without drafts.

    Args:
        x: [n, C].
        conv_states: [slots, C, S], read and written.
        weight: [C, S + 1].
        bias: [C] or None.
        activation: "silu", "swish" or None.
        conv_state_indices: [n], slots.

    Returns:
        [n, C].
    """
    slots = conv_state_indices.long()
    inputs = torch.cat([conv_states[slots].to(x.dtype), x[..., None]], dim=-1)
    conv_states[slots] = inputs[..., 1:].to(conv_states.dtype)
    return _convolve(inputs, weight, bias, activation)[..., 0]


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: Tensor,
) -> tuple[Tensor, None, Tensor]:
    """The delta rule over sequences of any length, as `kernels.ops.attention.fla.chunk.chunk_gated_delta_rule`.

    Args:
        q: [1, T, H, K], sequence after sequence.
        k: [1, T, H, K].
        v: [1, T, HV, V].
        g: [1, T, HV] float32.
        beta: [1, T, HV] float32.
        initial_state: [slots, HV, V, K], read and written.
        cu_seqlens: [n + 1], where each sequence begins, and T.
        head_first: False.
        use_qk_l2norm_in_kernel: True.
        initial_state_indices: [n], slots.

    Returns:
        [1, T, HV, V]; None; and the states in the dtype of v before the first token of every chunk of a sequence,
        [1, chunks, HV, V, K].
    """
    from sglang_dflash.ops.reference import delta_rule

    assert use_qk_l2norm_in_kernel and not head_first
    num_heads = v.shape[2]
    queries, keys = delta_rule.normalize(q[0], num_heads), delta_rule.normalize(k[0], num_heads)
    output, chunk_states = torch.empty_like(v), []
    starts = cu_seqlens.tolist()
    for i, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot].to(torch.float32, copy=True)
        for t in range(starts[i], starts[i + 1]):
            if (t - starts[i]) % CHUNK_SIZE == 0:
                chunk_states.append(state.to(v.dtype))
            state = delta_rule.update(state, keys[t], v[0, t], g[0, t], beta[0, t])
            output[0, t] = delta_rule.read(state, queries[t])
        initial_state[slot] = state
    return output, None, torch.stack(chunk_states)[None]


def fused_gdn_gating_cpu(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """As `kernels.ops.attention.linear.fused_gdn_gating.fused_gdn_gating`.

    Args:
        A_log: [HV].
        a: [T, HV].
        b: [T, HV].
        dt_bias: [HV].

    Returns:
        g and beta, [1, T, HV] float32.
    """
    from sglang_dflash.ops.reference import delta_rule

    log_decay, beta = delta_rule.gates(A_log, a, dt_bias, b)
    return log_decay[None], beta[None]


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> Tensor:
    """One token of each sequence, as
    `kernels.ops.attention.linear.fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update` without drafts.

    Args:
        A_log: [HV].
        dt_bias: [HV].
        q: [1, n, H, K].
        k: [1, n, H, K].
        v: [1, n, HV, V].
        a: [n, HV].
        b: [n, HV].
        initial_state_source: [slots, HV, V, K], read and written.
        initial_state_indices: [n], slots.
        cu_seqlens: [n + 1], 0, 1, ... n.
        use_qk_l2norm_in_kernel: True.
        softplus_beta: 1.
        softplus_threshold: 20.

    Returns:
        [1, n, HV, V]
    """
    from sglang_dflash.ops.reference import delta_rule

    assert use_qk_l2norm_in_kernel and (softplus_beta, softplus_threshold) == (1, 20)
    num_heads, slots = v.shape[2], initial_state_indices.long()
    log_decay, beta = delta_rule.gates(A_log, a, dt_bias, b)
    key = delta_rule.normalize(k[0], num_heads)
    state = delta_rule.update(initial_state_source[slots].float(), key, v[0], log_decay, beta)
    initial_state_source[slots] = state.to(initial_state_source.dtype)
    return delta_rule.read(state, delta_rule.normalize(q[0], num_heads)).to(v.dtype)[None]


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """x *= sigmoid(gate), as `kernels.ops.elementwise.elementwise.fused_sigmoid_mul`.

    Args:
        x: [T, N], written.
        gate: [T, N], or [T, heads, N / heads].
    """
    x.copy_(x.float() * gate.reshape(x.shape).float().sigmoid())


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Norm of every head of q, [T, Nq], and k, [T, Nk], as `models.utils.fused_qk_gemma_rmsnorm`.

    Returns:
        [T * Nq / head_dim, head_dim] and [T * Nk / head_dim, head_dim]
    """
    return (
        _gemma_rmsnorm(q.reshape(-1, head_dim), q_weight, eps),
        _gemma_rmsnorm(k.reshape(-1, head_dim), k_weight, eps),
    )


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As `models.utils.fused_qk_gemma_rmsnorm_with_gate`: q and its gate in turns.

    Args:
        q_gate: [T, num_heads * 2 * head_dim].
        k: [T, Nk].
        q_weight: [head_dim].
        k_weight: [head_dim].
        eps: of both norms.
        head_dim: size of every head.
        num_heads: heads of q.

    Returns:
        q, k and gate, [T * heads, head_dim] each.
    """
    q, gate = q_gate.reshape(-1, num_heads, 2, head_dim).unbind(2)
    q, k = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim)
    return q, k, gate.reshape(-1, head_dim).contiguous()


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `kernels.ops.attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat_contiguous`.

    Args:
        mixed_qkvz: [T, 2 * H * K + 2 * HV * V], all of q, k, v and z.
        mixed_ba: [T, 2 * HV], all of b and a.
        num_heads_qk: H.
        num_heads_v: HV.
        head_qk: K.
        head_v: V.

    Returns:
        q, k and v as they are, [T, C]; z [T, HV, V]; b and a, [T, HV].
    """
    num_tokens, size_v = mixed_qkvz.shape[0], num_heads_v * head_v
    mixed_qkv, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + size_v, size_v], dim=-1)
    b, a = mixed_ba.split([num_heads_v, num_heads_v], dim=-1)
    # An operator may not return views of what it was given.
    return mixed_qkv.clone(), z.reshape(num_tokens, num_heads_v, head_v).clone(), b.clone(), a.clone()


def _convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """[n, C, S + W], the first S of them the state, to [n, C, W]."""
    output = conv1d(inputs.to(weight.dtype), weight[:, None], bias, groups=weight.shape[0])
    return (silu(output) if activation in ("silu", "swish") else output).to(inputs.dtype)


def _gemma_rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    widened = x.float()
    normed = widened * torch.rsqrt(widened.square().mean(-1, keepdim=True) + eps)
    return (normed * (1 + weight.float())).to(x.dtype)


# Kept alive: a `Library` takes its definitions back when it is collected.
_OPERATORS = torch.library.Library("sgl_kernel", "FRAGMENT")
for _operator, _schema in (
    (fused_gdn_gating_cpu, "(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)"),
    (
        fused_sigmoid_gating_delta_rule_update_cpu,
        "(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, "
        "Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
        "bool use_qk_l2norm_in_kernel, float softplus_beta, float softplus_threshold) -> Tensor",
    ),
    (fused_sigmoid_mul_cpu, "(Tensor(a!) x, Tensor gate) -> ()"),
    (
        fused_qk_gemma_rmsnorm_cpu,
        "(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim) -> (Tensor, Tensor)",
    ),
    (
        fused_qk_gemma_rmsnorm_with_gate_cpu,
        "(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim, int num_heads) "
        "-> (Tensor, Tensor, Tensor)",
    ),
    (
        fused_qkvzba_split_reshape_cat_contiguous_cpu,
        "(Tensor mixed_qkvz, Tensor mixed_ba, int num_heads_qk, int num_heads_v, int head_qk, int head_v) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
    ),
):
    _OPERATORS.define(_operator.__name__ + _schema)
    _OPERATORS.impl(_operator.__name__, _operator, "CPU")
