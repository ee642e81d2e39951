"""Gumbel noise of sampled requests: a fixed number for each (request key, position, token).

The target draws argmax(logit / T + noise), which is an exact draw from softmax(logit / T) (the Gumbel-max trick). The
drafter adds the same noise before it chooses drafts, so a draft that agrees with the target's logits agrees with its
draw, too. The noise of a request never changes: the sampled text is a function of its prompt, its sampling parameters
and its key.

The generator is MurmurHash3 of the key's two 32-bit words, the position and the token, as SGLang's seeded draws hash
(`sglang.kernels.ops.sampling.murmur_hash`).
"""

from __future__ import annotations

import torch

# MurmurHash3, 32 bits (https://github.com/aappleby/smhasher).
FIRST_FACTOR, SECOND_FACTOR = 0xCC9E2D51, 0x1B873593
STATE_FACTOR, STATE_ADDEND = 5, 0xE6546B64
FIRST_FINAL_FACTOR, SECOND_FINAL_FACTOR = 0x85EBCA6B, 0xC2B2AE35
# Bytes that are hashed: two words of the key, the position and the token.
LENGTH = 16
# Uniform numbers are multiples of this.
SPACING = 2.0**-32
# Below it, log(1 - x) is a power series in x: the logarithm of a float32 near 1 has lost the digits of x.
SERIES_BELOW = 1 / 64

_UINT32 = 0xFFFFFFFF


def gumbel(keys: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the noise of tokens at positions.

    Args:
        keys: int64, of requests.
        positions: integers in [0, 2^32). Position of the token before the one that is drawn.
        tokens: integers in [0, 2^32). The three broadcast.

    Returns:
        float32 in (-3.2, 22.2), distributed as -log(-log(u)) of a uniform u.
    """
    bits = hash_words(keys, positions, tokens)
    low = bits.clamp(min=0.5).to(torch.float32) * SPACING
    high = (_UINT32 - bits).clamp(min=1).to(torch.float32) * SPACING
    series = high * (1 + high * (0.5 + high * (1 / 3 + high * 0.25)))
    return -torch.where(high < SERIES_BELOW, series, -low.log()).log()


def hash_words(keys: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the hashes of :func:`gumbel`'s arguments: int64 in [0, 2^32)."""
    keys, positions, tokens = (words.to(torch.int64) for words in (keys, positions, tokens))
    state = torch.zeros_like(keys)
    for word in (keys & _UINT32, keys >> 32 & _UINT32, positions, tokens):
        state = _mix(state, word)
    state = state ^ LENGTH
    state = (state ^ state >> 16) * FIRST_FINAL_FACTOR & _UINT32
    state = (state ^ state >> 13) * SECOND_FINAL_FACTOR & _UINT32
    return state ^ state >> 16


def _mix(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    # The low 32 bits of a product do not depend on how the high ones overflow.
    word = _rotate((word & _UINT32) * FIRST_FACTOR & _UINT32, 15) * SECOND_FACTOR & _UINT32
    return _rotate(state ^ word, 13) * STATE_FACTOR + STATE_ADDEND & _UINT32


def _rotate(word: torch.Tensor, bits: int) -> torch.Tensor:
    return (word << bits | word >> (32 - bits)) & _UINT32
