"""Update of bigram tables and texts with the tokens of a cycle, in one launch with one warp per request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops import bigrams

_FIRST_FACTOR = tl.constexpr(bigrams.FIRST_FACTOR)
_SECOND_FACTOR = tl.constexpr(bigrams.SECOND_FACTOR)
_MIXING_FACTOR = tl.constexpr(bigrams.MIXING_FACTOR)
_INDEX_SHIFT = tl.constexpr(32 - bigrams.TABLE_BITS)
_TAG_SHIFT = tl.constexpr(bigrams.TAG_SHIFT)
TABLE_SIZE = tl.constexpr(bigrams.TABLE_SIZE)


@triton.jit
def locate(first, second):
    """Return the int32 index and the tag of a pair; see :func:`sglang_dflash.ops.bigrams.locate`."""
    mixed = first.to(tl.uint32) * _FIRST_FACTOR ^ second.to(tl.uint32) * _SECOND_FACTOR
    hashes = mixed * _MIXING_FACTOR
    return (hashes >> _INDEX_SHIFT).to(tl.int32), (hashes >> _TAG_SHIFT).to(tl.int16)


@triton.jit
def _locate_pairs(first_token, tokens, index, is_pair):
    first = tl.load(tokens + index - 1, mask=is_pair & (index > 0), other=0)
    second = tl.load(tokens + index, mask=is_pair, other=0)
    return locate(tl.where(index > 0, first, first_token), second)


@triton.jit
def _add_bigrams_kernel(
    tables,
    req_pool_indices,
    first_tokens,
    first_stride,
    tokens,
    lens,
    is_chain,
    texts,
    seq_lens,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_TEXTS: tl.constexpr,
    TEXT_SIZE: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    num_pairs = tl.where(tl.load(is_chain + request) == 0, tl.load(lens + request), 0)
    first_token = tl.load(first_tokens + request * first_stride)
    tokens += request * WIDTH
    index = tl.arange(0, PADDED)
    is_pair = index < num_pairs
    slot, tag = _locate_pairs(first_token, tokens, index, is_pair)
    # Of pairs with the same index the last one is stored, whatever the order in which lanes store.
    later = tl.arange(0, PADDED)[None, :]
    later_slot, _ = _locate_pairs(first_token, tokens, later, later < num_pairs)
    is_taken = (later_slot == slot[:, None]) & (later > index[:, None]) & (later < num_pairs)
    is_newest = tl.sum(is_taken.to(tl.int32), axis=1) == 0
    row = tl.load(req_pool_indices + request).to(tl.int64)
    tl.store(tables + row * TABLE_SIZE + slot, tag, mask=is_pair & is_newest)
    if HAS_TEXTS:
        token = tl.load(tokens + index, mask=is_pair, other=0)
        place = (tl.load(seq_lens + request) + 1 + index) & (TEXT_SIZE - 1)
        tl.store(texts + row * TEXT_SIZE + place, token.to(tl.int32), mask=is_pair)


def add_bigrams(
    tables: torch.Tensor,
    req_pool_indices: torch.Tensor,
    first_tokens: torch.Tensor,
    tokens: torch.Tensor,
    lens: torch.Tensor,
    is_chain: torch.Tensor,
    texts: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
) -> None:
    """See :func:`sglang_dflash.ops.reference.add_bigrams.add_bigrams`."""
    bs, width = tokens.shape
    size = 1 if texts is None else texts.shape[1]
    assert size & (size - 1) == 0 and (texts is None or texts.is_contiguous())
    if bs:
        _add_bigrams_kernel[(bs,)](
            tables,
            req_pool_indices,
            first_tokens,
            first_tokens.stride(0),
            tokens.contiguous(),
            lens,
            is_chain,
            # Any valid pointer will do where there are none.
            tables if texts is None else texts,
            lens if seq_lens is None else seq_lens,
            WIDTH=width,
            PADDED=triton.next_power_of_2(width),
            HAS_TEXTS=texts is not None,
            TEXT_SIZE=size,
            num_warps=1,
        )
