"""Which tokens have followed each other in the texts of requests, in tables of a fixed size.

A drafter's rows know nothing of each other: which of its second tokens follows which of its first ones, it does not
say. The request's own text does, of words and names that come again. A table holds a tag of each pair at a place, both
from the pair's hash; a later pair takes the place of an earlier one, so that of long texts the end is known.
"""

from __future__ import annotations

import torch

# 8 KiB. Of 4,096 pairs in a row some 60 % are found again, and of pairs that are not there, one in 65,536.
TABLE_BITS = 12
TABLE_SIZE = 1 << TABLE_BITS
TABLE_DTYPE = torch.int16
# The logarithm of how many times as much a draft counts where the text has it behind the one before. What that gives,
# and what others do, is in scripts/results/cycle_notes.md.
LOG_WEIGHT = 2.0
# Odd numbers whose bits are spread out: those of MurmurHash3 and xxHash.
FIRST_FACTOR, SECOND_FACTOR, MIXING_FACTOR = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
TAG_SHIFT = 4

_UINT32 = 0xFFFFFFFF


def locate(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the table has a pair, and what stands there.

    Args:
        first, second: integers of any shapes that broadcast; what counts is their last 32 bits.

    Returns:
        places: int64 in [0, TABLE_SIZE).
        tags: int16.
    """
    # The low half of a product does not depend on how the high one overflows.
    mixed = (first.to(torch.int64) * FIRST_FACTOR ^ second.to(torch.int64) * SECOND_FACTOR) & _UINT32
    hashes = mixed * MIXING_FACTOR & _UINT32
    return hashes >> (32 - TABLE_BITS), (hashes >> TAG_SHIFT).to(TABLE_DTYPE)


def put(tables: torch.Tensor, first: torch.Tensor, second: torch.Tensor, is_pair: torch.Tensor) -> torch.Tensor:
    """The tables with more pairs.

    Args:
        tables: [n, TABLE_SIZE] int16.
        first, second: [n, L] integers, pairs in the order of the texts; L at most 32,768.
        is_pair: [n, L] bool, which of them there are.

    Returns:
        like `tables`.
    """
    places, tags = locate(first, second)
    order = torch.arange(first.shape[1], dtype=torch.int32, device=first.device)
    # The newest of those that share a place has the largest number, of whose end its tag is.
    numbers = (order << 16 | tags.to(torch.int32) & 0xFFFF).where(is_pair, -1)
    newest = torch.full_like(tables, -1, dtype=torch.int32).scatter_reduce_(1, places, numbers, "amax")
    return torch.where(newest < 0, tables, newest.to(TABLE_DTYPE))


def tables_of(texts: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """Tables of whole texts.

    Args:
        texts: [n, L] integers.
        lens: [n] integers, tokens of each.

    Returns:
        [n, TABLE_SIZE] int16.
    """
    tables = torch.zeros((len(texts), TABLE_SIZE), dtype=TABLE_DTYPE, device=texts.device)
    is_pair = torch.arange(texts.shape[1], device=texts.device)[1:] < lens[:, None]
    return put(tables, texts[:, :-1], texts[:, 1:], is_pair)
