"""Copies of the request's own text as candidates, in one launch with one thread block per request.

A thread block reads the kept text once, in tiles, from L2. Each lane remembers the best match of its places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops import copies

_LOOKUP = tl.constexpr(copies.LOOKUP)
_MIN_MATCH = tl.constexpr(copies.MIN_MATCH)
_MAX_MATCH = tl.constexpr(copies.MAX_MATCH)
_LOWEST = tl.constexpr(float("-inf"))
# Larger tiles wait less often for their loads, and smaller ones waste less on short texts.
_PLACES = 2048


@triton.jit
def _is_same_token(text, end, back, i, last, SIZE: tl.constexpr):
    """Return whether the i-th token before each place is the i-th before the text's end."""
    is_kept = back + i <= last
    token = tl.load(text + ((end - back - i) & (SIZE - 1)), mask=is_kept, other=0)
    return is_kept & (token == tl.load(text + ((end - i) & (SIZE - 1))))


@triton.jit
def _place_copies_kernel(
    texts,
    req_pool_indices,
    seq_lens,
    is_chain,
    candidates,
    logits,
    places,
    lens,
    SIZE: tl.constexpr,
    DEPTHS: tl.constexpr,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    PADDED_DEPTHS: tl.constexpr,
    PADDED: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    text = texts + tl.load(req_pool_indices + request).to(tl.int64) * SIZE
    seq_len = tl.load(seq_lens + request)
    # Places are counted back from the bonus token, which is at 0. The earliest one that is kept is at `last`.
    last = tl.minimum(seq_len, SIZE - 1).to(tl.int32)
    end = (seq_len & (SIZE - 1)).to(tl.int32)
    last = tl.where(tl.load(is_chain + request) == 0, last, 0)

    # The length of a match, then its place, of which the lowest is the best. 0: there is none.
    best = tl.zeros([PLACES], tl.int32)
    for start in range(1, last + 1, PLACES):
        back = start + tl.arange(0, PLACES)
        is_same = back + _MIN_MATCH - 1 <= last
        for i in tl.static_range(_MIN_MATCH):
            is_same &= _is_same_token(text, end, back, i, last, SIZE)
        # Most tiles have no match.
        if tl.max(is_same.to(tl.int32)) > 0:
            key = tl.where(is_same, _MIN_MATCH * SIZE + (SIZE - 1 - back), 0)
            for i in tl.static_range(_MIN_MATCH, _LOOKUP):
                is_same &= _is_same_token(text, end, back, i, last, SIZE)
                key += tl.where(is_same, SIZE, 0)
            best = tl.maximum(best, key)
    found = tl.max(best)
    is_found = found > 0
    place = tl.where(is_found, SIZE - 1 - (found & (SIZE - 1)), 1)

    counted = tl.arange(0, _MAX_MATCH)
    is_kept = place + counted <= last
    earlier = tl.load(text + ((end - place - counted) & (SIZE - 1)), mask=is_kept, other=0)
    own = tl.load(text + ((end - counted) & (SIZE - 1)), mask=is_kept, other=0)
    num_matching = tl.min(tl.where(is_kept & (earlier == own), _MAX_MATCH, counted))
    tl.store(lens + request, tl.where(is_found, num_matching, 0))

    depth = tl.arange(0, PADDED_DEPTHS)
    is_depth = depth < DEPTHS
    copy = tl.load(text + ((end - place + 1 + depth % place) & (SIZE - 1)), mask=is_depth & is_found, other=-1)
    num_copied = tl.min(tl.where(is_depth & (copy < 0), depth, DEPTHS))
    has_copy = depth < num_copied
    column = tl.arange(0, PADDED)
    rows = (request * DEPTHS + depth) * K
    is_candidate = has_copy[:, None] & (column < K)[None, :]
    candidate = tl.load(candidates + rows[:, None] + column[None, :], mask=is_candidate, other=-1)
    is_copy = is_candidate & (candidate == copy[:, None])
    rank = tl.min(tl.where(is_copy, column[None, :], K), axis=1)
    is_new = has_copy & (rank == K)
    tl.store(candidates + rows + K - 1, copy.to(tl.int64), mask=is_new)
    tl.store(logits + rows + K - 1, tl.full([PADDED_DEPTHS], _LOWEST, tl.float32), mask=is_new)
    rank = tl.where(has_copy, tl.minimum(rank, K - 1), -1)
    tl.store(places + request * DEPTHS + depth, rank, mask=is_depth)


def place_copies(
    texts: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    is_chain: torch.Tensor,
    candidates: torch.Tensor,
    logits: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`sglang_dflash.ops.reference.place_copies.place_copies`."""
    bs, depths, k = candidates.shape
    size = texts.shape[1]
    assert size & (size - 1) == 0 and texts.is_contiguous() and candidates.is_contiguous() and logits.is_contiguous()
    # Lengths and places share an int32.
    assert size * (copies.LOOKUP + 1) < 2**31 and size >= copies.LOOKUP
    places = torch.empty((bs, depths), dtype=torch.int32, device=candidates.device)
    lens = torch.empty(bs, dtype=torch.int32, device=candidates.device)
    if bs and depths:
        _place_copies_kernel[(bs,)](
            texts,
            req_pool_indices,
            seq_lens,
            is_chain,
            candidates,
            logits,
            places,
            lens,
            SIZE=size,
            DEPTHS=depths,
            K=k,
            PLACES=_PLACES,
            PADDED_DEPTHS=triton.next_power_of_2(depths),
            PADDED=triton.next_power_of_2(k),
            num_warps=8,
        )
    return places, lens
