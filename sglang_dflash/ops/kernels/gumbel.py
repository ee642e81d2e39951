"""Gumbel noise inside kernels; see :mod:`sglang_dflash.ops.noise`."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from sglang_dflash.ops import noise

_FIRST_FACTOR, _SECOND_FACTOR = tl.constexpr(noise.FIRST_FACTOR), tl.constexpr(noise.SECOND_FACTOR)
_STATE_FACTOR, _STATE_ADDEND = tl.constexpr(noise.STATE_FACTOR), tl.constexpr(noise.STATE_ADDEND)
_FIRST_FINAL_FACTOR = tl.constexpr(noise.FIRST_FINAL_FACTOR)
_SECOND_FINAL_FACTOR = tl.constexpr(noise.SECOND_FINAL_FACTOR)
_LENGTH = tl.constexpr(noise.LENGTH)
_SPACING, _SERIES_BELOW = tl.constexpr(noise.SPACING), tl.constexpr(noise.SERIES_BELOW)
_UPPER_END = tl.constexpr(2.0**32 - 256)
# A float32 has 23 bits of mantissa and an exponent that is 127 too large.
_LINE_SLOPE, _LINE_END = tl.constexpr(math.log(2) * 2.0**-23), tl.constexpr(math.log(2) * (127 + 32))


@triton.jit
def _mix(state, word):
    word *= _FIRST_FACTOR
    word = ((word << 15) | (word >> 17)) * _SECOND_FACTOR
    state ^= word
    return ((state << 13) | (state >> 19)) * _STATE_FACTOR + _STATE_ADDEND


@triton.jit
def hash_prefix(key, position):
    """Return the state of the hash before the token, uint32.

    Args:
        key: int64.
        position: integer. Both may be tensors.
    """
    state = _mix(key.to(tl.uint32) * 0, key.to(tl.uint32))
    state = _mix(state, (key >> 32).to(tl.uint32))
    return _mix(state, position.to(tl.uint32))


@triton.jit
def hash_token(prefix, token):
    """Return the hash of a token, uint32; prefix: of :func:`hash_prefix`, which broadcasts with the token."""
    state = _mix(prefix, token.to(tl.uint32)) ^ _LENGTH
    state = (state ^ (state >> 16)) * _FIRST_FINAL_FACTOR
    state = (state ^ (state >> 13)) * _SECOND_FINAL_FACTOR
    return state ^ (state >> 16)


@triton.jit
def gumbel_bound(bits):
    """Return a number that the noise of a hash does not exceed, float32. It takes no logarithm.

    The noise -log(-log(u)) is at most -log(1 - u). The bits of a float32, read as an integer, are a straight line
    just below its logarithm. So the bound is close where the noise is large. One hash in 2^20 has a larger bound.
    """
    # At most 2^32 * (1 - u), as the conversion rounds by 128 at most. The bound of a negative number is above 22.2.
    upper = -bits.to(tl.float32) + _UPPER_END
    return upper.to(tl.int32, bitcast=True).to(tl.float32) * -_LINE_SLOPE + _LINE_END


@triton.jit
def gumbel(prefix, token):
    """Return the noise of a token, float32; prefix: of :func:`hash_prefix`, which broadcasts with the token."""
    bits = hash_token(prefix, token)
    low = tl.maximum(bits.to(tl.float32), 0.5) * _SPACING
    high = tl.maximum((bits ^ 0xFFFFFFFF).to(tl.float32), 1.0) * _SPACING
    series = high * (1.0 + high * (0.5 + high * (1 / 3 + high * 0.25)))
    return -tl.log(tl.where(high < _SERIES_BELOW, series, -tl.log(low)))
