"""The gated delta rule of Gated DeltaNet layers, for every kernel that advances a state or reads it.

See :mod:`sglang_dflash.ops.reference.delta_rule`. All W nodes of a tree are computed at once. A chain is a tree in
which node i sees nodes 0 to i. Let S be the state before the tree. A node's ancestors are the nodes on its path before
it. decay(i) is the product of the decays of node i and its ancestors. decay(i, j) is the product of the decays on the
path after node j, up to and including node i. Keys and queries have length 1. Then u_i, what node i adds to the state
at its key, and o_i, what it reads, are

    u_i = beta_i (v_i - decay(i) S k_i - sum over the ancestors j of decay(i, j) (k_i k_j) u_j)
    o_i = decay(i) S q_i + sum over i and its ancestors j of decay(i, j) (q_i k_j) u_j

The state after node i is decay(i) S + sum over i and its ancestors j of decay(i, j) u_j k_j^T. Source: the WY form of
Gated Delta Networks (Yang et al., arXiv 2412.06464, section 3.3), here for trees and without a state per node.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Of products of matrices in float32: about as exact as float32, on tensor cores.
PRECISION = "tf32x3"
# The least size that a product of matrices has.
MIN_SIZE = 16


@triton.jit
def gates(a_log, a, dt_bias, b):
    """Logarithm of the decay, and strength, of an update; numbers of whatever dtype."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    # In float32 the logarithm is x from there on; further on, exp overflows.
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))
    beta = tl.sigmoid(b.to(tl.float32)).to(b.dtype).to(tl.float32)
    return -tl.exp(a_log.to(tl.float32)) * softplus, beta


@triton.jit
def inverse_length(squares):
    """Return the factors that give queries or keys length 1; squares: sums of their squared elements."""
    return 1.0 / tl.sqrt(squares + 1e-6)


@triton.jit
def add_product(total, x, y, IS_SHORT: tl.constexpr, PRECISION: tl.constexpr):
    """total + x y; x: float32; y: float32, if IS_SHORT numbers of 16 bits."""
    if IS_SHORT:
        # They are numbers of tf32, and a float32 is the sum of two, up to half of its last digit.
        high = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        total = tl.dot(x - high, y, acc=total, input_precision="tf32")
        return tl.dot(high, y, acc=total, input_precision="tf32")
    return tl.dot(x, y, acc=total, input_precision=PRECISION)


@triton.jit
def decays(log_decay, sees, W: tl.constexpr, PRECISION: tl.constexpr):
    """The decays along paths.

    Exponents are sums along paths, computed as a product of matrices. The product is exactly 0 for a pair that is not
    on one path, so no exponent is positive. Differences of sums from the root would lose small terms, and off the path
    they are positive without bound.

    Args:
        log_decay: [W] float32, at most 0.
        sees: [W, W] bool. Whether node i sees node j: j is i or one of its ancestors.

    Returns:
        [W, W] float32: decay(i, j) where node i sees node j, else 0.
        [W] float32: decay(i).
    """
    i, j = tl.arange(0, W)[:, None], tl.arange(0, W)[None, :]
    below = tl.where(sees & (i != j), log_decay[:, None], 0.0)
    between = tl.dot(tl.where(sees, 1.0, 0.0), below, input_precision=PRECISION)
    from_before = tl.exp(tl.sum(tl.where(sees, log_decay[None, :], 0.0), axis=1))
    return tl.where(sees, tl.exp(between), 0.0), from_before


@triton.jit
def invert(lower, W: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + lower)^-1 of a matrix [W, W] that is 0 on and above its diagonal; W = 2^LEVELS.

    Block by block, of twice the size each time. Nothing on the way is larger than the inverse, as powers of `lower` are
    where keys resemble each other.
    """
    i, j = tl.arange(0, W)[:, None], tl.arange(0, W)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, lower, 0.0)
    for level in tl.static_range(1, LEVELS):
        half = 1 << level
        is_between = (i // (2 * half) == j // (2 * half)) & (i // half != j // half)
        product = tl.dot(inverse, tl.where(is_between, lower, 0.0), input_precision=PRECISION)
        inverse -= tl.dot(product, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def advance(
    state, key, change, log_decay, num_tokens, W: tl.constexpr, IS_SHORT: tl.constexpr, PRECISION: tl.constexpr
):
    """Return the state after the first `num_tokens` of W tokens of one path.

    Args:
        state: [V, K] float32, or a tile of it. The state before the tokens.
        key, change, log_decay: [W, K], [W, V], [W] float32, rows of :class:`sglang_dflash.types.BlockInputs`.
        IS_SHORT: the keys are numbers of 16 bits.
    """
    i, j = tl.arange(0, W)[:, None], tl.arange(0, W)[None, :]
    is_token = tl.arange(0, W) < num_tokens
    log_decay = tl.where(is_token, log_decay, 0.0)
    to_the_end = tl.sum(tl.where(i > j, log_decay[:, None], 0.0), axis=0)
    change *= tl.where(is_token, tl.exp(to_the_end), 0.0)[:, None]
    decayed = state * tl.exp(tl.sum(log_decay, axis=0))
    return add_product(decayed, tl.trans(change), key, IS_SHORT, PRECISION)
