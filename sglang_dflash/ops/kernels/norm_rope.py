"""A head's RMSNorm and rotation, for every kernel that makes queries or keys."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_rope(low, high, low_weight, high_weight, eps, cos, sin, HALF: tl.constexpr, DTYPE: tl.constexpr):
    """See :func:`sglang_dflash.ops.reference.norm_rope.norm_rope`.

    Heads come in their halves, [heads, D / 2] float32 each; so do weights, cosines and sines, or what broadcasts to
    them. Columns from D / 2 = HALF on are 0. Returns the two halves in DTYPE.
    """
    scale = tl.rsqrt(tl.sum(low * low + high * high, axis=1)[:, None] / (2 * HALF) + eps)
    low = (low * scale * low_weight).to(DTYPE).to(tl.float32)
    high = (high * scale * high_weight).to(DTYPE).to(tl.float32)
    return (low * cos - high * sin).to(DTYPE), (high * cos + low * sin).to(DTYPE)
