"""The gated delta rule of Gated DeltaNet layers, for every kernel that advances a state or reads it.

See :mod:`sglang_dflash.ops.reference.delta_rule`. A state of a head, or some rows of it, is [K / KEYS, rows, KEYS], and
a key or query [K / KEYS, KEYS], all float32: a sum over K is then over numbers of the same thread first and over eight
threads after it, not over all of a warp, once for every row.
"""

from __future__ import annotations

import triton
import triton.language as tl

KEYS = tl.constexpr(32)


@triton.jit
def gates(a_log, a, dt_bias, b):
    """Logarithm of the decay, and strength, of an update; numbers of whatever dtype."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    # In float32 the logarithm is x from there on; further on, exp overflows.
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))
    beta = tl.sigmoid(b.to(tl.float32)).to(b.dtype).to(tl.float32)
    return -tl.exp(a_log.to(tl.float32)) * softplus, beta


@triton.jit
def normalize(x):
    """A query or key, of whatever dtype, of length 1."""
    x = x.to(tl.float32)
    return x / tl.sqrt(tl.sum(tl.sum(x * x, axis=0), axis=0) + 1e-6)


@triton.jit
def update(state, key, value, log_decay, beta):
    """The state after one more token; value: [rows]."""
    state = state * tl.exp(log_decay)
    change = (value.to(tl.float32) - tl.sum(tl.sum(state * key[:, None, :], axis=0), axis=1)) * beta
    return state + change[None, :, None] * key[:, None, :]


@triton.jit
def read(state, query, scale):
    """What a query finds in a state: [rows]; scale: 1 / sqrt(K)."""
    return tl.sum(tl.sum(state * (query * scale)[:, None, :], axis=0), axis=1)


@triton.jit
def key_columns(K_TILES: tl.constexpr):
    """[K / KEYS, KEYS], which of the K numbers is where."""
    return tl.arange(0, K_TILES)[:, None] * KEYS + tl.arange(0, KEYS)[None, :]
