"""Floats as integers of the same order, the largest of which a warp finds in one instruction."""

from __future__ import annotations

import triton
import triton.language as tl

# Below every number's.
LOWEST = tl.constexpr(-(2**31))
# Beyond every column.
NO_COLUMN = tl.constexpr(2**31 - 1)


@triton.jit
def to_ordered(x):
    """float32 as int32; both zeros are the same."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_ordered(key):
    """What :func:`to_ordered` was given."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pop(keys, columns):
    """Take the largest key, the first of the columns that have it away; none is left where the key is LOWEST."""
    best = tl.max(keys)
    column = tl.min(tl.where((keys == best) & (best != LOWEST), columns, NO_COLUMN))
    return best, column, tl.where(columns == column, LOWEST, keys)
