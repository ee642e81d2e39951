"""Floats as integers of the same order, whose maximum a warp finds in one instruction."""

from __future__ import annotations

import triton
import triton.language as tl

# Less than the key of every number.
LOWEST = tl.constexpr(-(2**31))
# Greater than every column.
NO_COLUMN = tl.constexpr(2**31 - 1)
# Replaces a maximum of -inf in a log-sum-exp, because -inf - -inf is NaN. Values this low add nothing to a sum.
LEAST = tl.constexpr(-1e38)


@triton.jit
def to_ordered(x):
    """Return an int32 key of the same order for a float32. Both zeros have the same key."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_ordered(key):
    """Return the float32 of a key that :func:`to_ordered` made."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pop(keys, columns):
    """Return the largest key, the first of its columns, and the keys without it. LOWEST means that no key is left."""
    best = tl.max(keys)
    column = tl.min(tl.where((keys == best) & (best != LOWEST), columns, NO_COLUMN))
    return best, column, tl.where(columns == column, LOWEST, keys)


@triton.jit
def store_best(keys, columns, best_values, best_columns, K: tl.constexpr):
    """Store the values and the columns of the K largest keys, in descending order."""
    for i in range(K):
        best, column, keys = pop(keys, columns)
        tl.store(best_values + i, from_ordered(best))
        tl.store(best_columns + i, column.to(tl.int64))
