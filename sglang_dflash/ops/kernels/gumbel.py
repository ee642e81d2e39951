"""Gumbel noise inside kernels; see :mod:`sglang_dflash.ops.noise`."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_dflash.ops import noise

_FIRST_FACTOR, _SECOND_FACTOR = tl.constexpr(noise.FIRST_FACTOR), tl.constexpr(noise.SECOND_FACTOR)
_STATE_FACTOR, _STATE_ADDEND = tl.constexpr(noise.STATE_FACTOR), tl.constexpr(noise.STATE_ADDEND)
_FIRST_FINAL_FACTOR = tl.constexpr(noise.FIRST_FINAL_FACTOR)
_SECOND_FINAL_FACTOR = tl.constexpr(noise.SECOND_FINAL_FACTOR)
_LENGTH = tl.constexpr(noise.LENGTH)
_SPACING, _SERIES_BELOW = tl.constexpr(noise.SPACING), tl.constexpr(noise.SERIES_BELOW)


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
def gumbel(prefix, token):
    """Return the noise of a token, float32; prefix: of :func:`hash_prefix`, which broadcasts with the token."""
    state = _mix(prefix, token.to(tl.uint32)) ^ _LENGTH
    state = (state ^ (state >> 16)) * _FIRST_FINAL_FACTOR
    state = (state ^ (state >> 13)) * _SECOND_FINAL_FACTOR
    bits = state ^ (state >> 16)
    low = tl.maximum(bits.to(tl.float32), 0.5) * _SPACING
    high = tl.maximum((bits ^ 0xFFFFFFFF).to(tl.float32), 1.0) * _SPACING
    series = high * (1.0 + high * (0.5 + high * (1 / 3 + high * 0.25)))
    return -tl.log(tl.where(high < _SERIES_BELOW, series, -tl.log(low)))
