"""The gated delta rule of Gated DeltaNet layers, token by token.

Source: Gated Delta Networks (Yang et al., arXiv 2412.06464), as SGLang's decoding computes it on a GPU
(`kernels.ops.attention.fla.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode`): in float32, whatever the
dtype of its inputs, but for the strength of an update, which is rounded to that dtype. SGLang's own verification does
not round it, so that its states part from those of decoding with every token.
A state maps keys to values: S' = exp(g) S + beta (v - exp(g) S k) k^T, and o = S' q.
Shapes: T tokens, H key heads, HV value heads, K and V their sizes; value head i has key head i // (HV / H).
"""

from __future__ import annotations

import torch
from torch.nn.functional import softplus


def gates(
    a_log: torch.Tensor, a: torch.Tensor, dt_bias: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the decay and the strength of every update.

    Args:
        a_log: [HV], logarithm of the decay's rate.
        a: [..., HV], of which the step is made.
        dt_bias: [HV].
        b: [..., HV].

    Returns:
        g = -exp(a_log) softplus(a + dt_bias), and beta = sigmoid(b) in the precision of b, [..., HV] float32.
    """
    log_decay = -a_log.float().exp() * softplus(a.float() + dt_bias.float())
    return log_decay, b.float().sigmoid().to(b.dtype).float()


def lengths(x: torch.Tensor) -> torch.Tensor:
    """Return the lengths of queries or keys, which divide them: [..., H, K] to [..., H] float32."""
    return (x.float().square().sum(-1) + 1e-6).sqrt()


def normalize(x: torch.Tensor, num_value_heads: int) -> torch.Tensor:
    """Return queries or keys of length 1 in float32, one for each value head: [..., H, K] to [..., HV, K]."""
    return for_value_heads(x.float() / lengths(x)[..., None], num_value_heads, dim=-2)


def for_value_heads(x: torch.Tensor, num_value_heads: int, dim: int) -> torch.Tensor:
    """Repeat the values of key heads for the value heads of each; dim: that of the heads."""
    return x.repeat_interleave(num_value_heads // x.shape[dim], dim=dim)


def change(
    state: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Return what a token adds to the state at its key, [..., HV, V] float32.

    Args:
        state: [..., HV, V, K] float32, before the token.
        key: [..., HV, K] float32, of :func:`normalize`.
        value: [..., HV, V].
        log_decay: [..., HV] float32, of :func:`gates`.
        beta: [..., HV] float32, of :func:`gates`.
    """
    found = (state * key[..., None, :]).sum(-1) * log_decay.exp()[..., None]
    return (value.float() - found) * beta[..., None]


def put(state: torch.Tensor, key: torch.Tensor, changed: torch.Tensor, log_decay: torch.Tensor) -> torch.Tensor:
    """Return the state after one more token, [..., HV, V, K]; changed: of :func:`change`, the others as there."""
    return state * log_decay.exp()[..., None, None] + changed[..., None] * key[..., None, :]


def update(
    state: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Return the state after one more token; arguments of :func:`change`."""
    return put(state, key, change(state, key, value, log_decay, beta), log_decay)


def read(state: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return what a query reads from a state, [..., HV, V]; query: [..., HV, K] float32, of :func:`normalize`."""
    return (state * query[..., None, :]).sum(-1) * query.shape[-1] ** -0.5
