"""RMSNorm and RoPE of attention heads, for every kernel that makes queries or keys."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_rope(low, high, low_weight, high_weight, eps, cos, sin, HALF: tl.constexpr, DTYPE: tl.constexpr):
    """Normalise and rotate heads; see :func:`sglang_dflash.ops.reference.norm_rope.norm_rope`.

    Args:
        low, high: [heads, padded half] float32. Halves of the heads; columns from HALF on are 0.
        low_weight, high_weight, cos, sin: float32. Broadcast to `low`.
        HALF: head_dim / 2.
        DTYPE: dtype of the results.

    Returns:
        The two halves in DTYPE.
    """
    scale = tl.rsqrt(tl.sum(low * low + high * high, axis=1)[:, None] / (2 * HALF) + eps)
    low = (low * scale * low_weight).to(DTYPE).to(tl.float32)
    high = (high * scale * high_weight).to(DTYPE).to(tl.float32)
    return (low * cos - high * sin).to(DTYPE), (high * cos + low * sin).to(DTYPE)
