"""First weights of a linear layer, brought to the L2 cache while the kernel before it still runs."""

from __future__ import annotations

import triton
import triton.language as tl

# Bytes of a line of the L2 cache.
_LINE = tl.constexpr(128)


@triton.jit
def fetch_early(weight, column, is_column, size_k, BYTES: tl.constexpr):
    """Bring the first weights of columns to the L2 cache, without waiting for them.

    Args:
        weight: [N, size_k], contiguous.
        column: rows of `weight` that are the columns of a tile.
        is_column: whether they exist.
        BYTES: of each column, a power of two from 128 on.
    """
    NUMBERS: tl.constexpr = _LINE * 8 // weight.dtype.element_ty.primitive_bitwidth
    line = tl.arange(0, BYTES // _LINE) * NUMBERS
    # Other columns fetch the first line of the weight.
    start = tl.where(is_column, column * size_k, 0)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [weight + (start[:, None] + tl.minimum(line, size_k - 1)[None, :])],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
