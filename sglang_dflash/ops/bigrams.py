"""Tables of token pairs (bigrams) that occurred in the texts of requests, of a fixed size per request.

A drafter predicts the positions of a block independently, so it does not know which of its tokens follow each other.
The text so far does, for words and names that repeat. A table is indexed by a hash of the pair and stores a tag, made
of other bits of the hash. A later pair overwrites an earlier one at the same index, so long texts keep their end.
"""

from __future__ import annotations

import torch

# 8 KiB. Of 4,096 consecutive pairs about 60 % are found again. Of absent pairs, one in 65,536 is found.
TABLE_BITS = 12
TABLE_SIZE = 1 << TABLE_BITS
TABLE_DTYPE = torch.int16
# Added to the log-probability of a draft whose pair with the token before is in the table.
# scripts/results/cycle_notes.md compares values.
LOG_WEIGHT = 2.0
# Odd constants of MurmurHash3 and xxHash, whose bits are well spread.
FIRST_FACTOR, SECOND_FACTOR, MIXING_FACTOR = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
TAG_SHIFT = 4

_UINT32 = 0xFFFFFFFF


def locate(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the table index and the tag of pairs.

    Args:
        first, second: integers of shapes that broadcast. Their low 32 bits count.

    Returns:
        indices: int64 in [0, TABLE_SIZE).
        tags: int16.
    """
    # int64 overflow does not change the low 32 bits of a product.
    mixed = (first.to(torch.int64) * FIRST_FACTOR ^ second.to(torch.int64) * SECOND_FACTOR) & _UINT32
    hashes = mixed * MIXING_FACTOR & _UINT32
    return hashes >> (32 - TABLE_BITS), (hashes >> TAG_SHIFT).to(TABLE_DTYPE)


def put(tables: torch.Tensor, first: torch.Tensor, second: torch.Tensor, is_pair: torch.Tensor) -> torch.Tensor:
    """Return the tables with more pairs.

    Args:
        tables: [bs, TABLE_SIZE] int16.
        first, second: [bs, T] integers. Pairs in the order of the texts; T at most 32,768.
        is_pair: [bs, T] bool. Which of the pairs are valid.

    Returns:
        Shape and dtype of `tables`.
    """
    indices, tags = locate(first, second)
    order = torch.arange(first.shape[1], dtype=torch.int32, device=first.device)
    # Of pairs with the same index the last one has the largest number; the number ends with the pair's tag.
    numbers = (order << 16 | tags.to(torch.int32) & 0xFFFF).where(is_pair, -1)
    newest = torch.full_like(tables, -1, dtype=torch.int32).scatter_reduce_(1, indices, numbers, "amax")
    return torch.where(newest < 0, tables, newest.to(TABLE_DTYPE))


def tables_of(texts: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """Return tables of whole texts.

    Args:
        texts: [bs, T] integers.
        lens: [bs] integers. Tokens of each text.

    Returns:
        [bs, TABLE_SIZE] int16.
    """
    tables = torch.zeros((len(texts), TABLE_SIZE), dtype=TABLE_DTYPE, device=texts.device)
    is_pair = torch.arange(texts.shape[1], device=texts.device)[1:] < lens[:, None]
    return put(tables, texts[:, :-1], texts[:, 1:], is_pair)
