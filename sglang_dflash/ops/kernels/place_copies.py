"""Copies of the request's own text as candidates, in one launch with one thread block per request.

A thread block reads the kept text once, all of it at the same time. Each lane notes which of its places end a match of
MIN_MATCH tokens. There are few, whose matches are then measured one after the other.

The texts are read while the kernel before finds the candidates. So that kernel must not be the one that writes the
texts: `add_bigrams` and `write_texts` let no kernel begin early.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops import copies
from sglang_dflash.ops.kernels import pdl

_LOOKUP = tl.constexpr(copies.LOOKUP)
_MIN_MATCH = tl.constexpr(copies.MIN_MATCH)
_MAX_MATCH = tl.constexpr(copies.MAX_MATCH)
_LOWEST = tl.constexpr(float("-inf"))
# A lane notes its places in the bits of an int32.
_MOST_PLACES = 32
# Lanes for the longest text. Fewer have more places each.
_LANES = 512


@triton.jit
def _load_text(text, start, SIZE: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, limit):
    """Return WIDTH tokens of the ring for each lane, [LANES, WIDTH]. They begin at `start`, and those of lanes 4 apart.

    Lanes whose tokens are behind the limit load nothing.
    """
    place = start + 4 * tl.arange(0, LANES)[:, None]
    place = tl.multiple_of(place & (SIZE - 1), (WIDTH, WIDTH)) + tl.arange(0, WIDTH)[None, :]
    return tl.load(text + place, mask=start + 4 * tl.arange(0, LANES)[:, None] < limit, other=0)


@triton.jit
def _ends_match(token, before, second_before, own, own_before, own_second_before):
    """Return 1 where a place and the two before it have the text's last tokens, else 0."""
    return ((token == own) & (before == own_before) & (second_before == own_second_before)).to(tl.int32)


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
    LANES: tl.constexpr,
    PADDED_DEPTHS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    text = texts + tl.load(req_pool_indices + request).to(tl.int64) * SIZE
    seq_len = tl.load(seq_lens + request)
    chain = tl.load(is_chain + request)
    # Places are counted back from the bonus token, which is at 0. The earliest one that is kept is at `last`.
    last = tl.minimum(seq_len, SIZE - 1).to(tl.int32)
    end = (seq_len & (SIZE - 1)).to(tl.int32)
    last = tl.where(chain == 0, last, 0)
    own = tl.load(text + end)
    own_before = tl.load(text + ((end - 1) & (SIZE - 1)))
    own_second_before = tl.load(text + ((end - 2) & (SIZE - 1)))

    lane = tl.arange(0, LANES)
    matches = lane * 0
    for start in tl.static_range(0, SIZE, 4 * LANES):
        # A ring that is not full is used up to `last`.
        even, odd = tl.split(tl.reshape(_load_text(text, start, SIZE, LANES, 4, last + 1), (LANES, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        second_before, before = tl.split(_load_text(text, start - 2, SIZE, LANES, 2, last - 1))
        matches |= _ends_match(first, before, second_before, own, own_before, own_second_before) << start // LANES
        matches |= _ends_match(second, first, before, own, own_before, own_second_before) << start // LANES + 1
        matches |= _ends_match(third, second, first, own, own_before, own_second_before) << start // LANES + 2
        matches |= _ends_match(fourth, third, second, own, own_before, own_second_before) << start // LANES + 3

    # The length of a match, then its place, of which the lowest is the best. 0: there is none.
    best = lane * 0
    while tl.max((matches != 0).to(tl.int32)) > 0:
        lowest = matches & -matches
        # The exponent of a float32 is the number of the bit.
        bit = (lowest.to(tl.uint32).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        place = (bit >> 2) * (4 * LANES) + 4 * lane + (bit & 3)
        back = (end - place) & (SIZE - 1)
        is_match = (matches != 0) & (back > 0)
        is_same, length = is_match, tl.where(is_match, _MIN_MATCH, 0)
        for i in tl.static_range(_MIN_MATCH, _LOOKUP):
            token = tl.load(text + ((place - i) & (SIZE - 1)), mask=is_match, other=0)
            is_same &= token == tl.load(text + ((end - i) & (SIZE - 1)))
            length += is_same.to(tl.int32)
        # What is before the first token that is kept belongs to the text's end, or to another text.
        length = tl.minimum(length, last + 1 - back)
        best = tl.maximum(best, tl.where(length >= _MIN_MATCH, length * SIZE + (SIZE - 1 - back), 0))
        matches ^= lowest
    found = tl.max(best)
    is_found = found > 0
    place = tl.where(is_found, SIZE - 1 - (found & (SIZE - 1)), 1)

    counted = tl.arange(0, _MAX_MATCH)
    is_kept = place + counted <= last
    earlier = tl.load(text + ((end - place - counted) & (SIZE - 1)), mask=is_kept, other=0)
    own = tl.load(text + ((end - counted) & (SIZE - 1)), mask=is_kept, other=0)
    depth = tl.arange(0, PADDED_DEPTHS)
    is_depth = depth < DEPTHS
    copy = tl.load(text + ((end - place + 1 + depth % place) & (SIZE - 1)), mask=is_depth & is_found, other=-1)
    num_matching = tl.min(tl.where(is_kept & (earlier == own), _MAX_MATCH, counted))
    has_copy = depth < tl.min(tl.where(is_depth & (copy < 0), depth, DEPTHS))

    # Up to here nothing was read that the kernel before writes, so both can run at the same time.
    pdl.wait_and_release(PDL)
    column = tl.arange(0, PADDED)
    rows = (request * DEPTHS + depth) * K
    is_candidate = is_depth[:, None] & (column < K)[None, :]
    candidate = tl.load(candidates + rows[:, None] + column[None, :], mask=is_candidate, other=-1)
    tl.store(lens + request, tl.where(is_found, num_matching, 0))
    rank = tl.min(tl.where(is_candidate & (candidate == copy[:, None]), column[None, :], K), axis=1)
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
    # The kernel compares three tokens of all places.
    assert copies.MIN_MATCH == 3
    assert size & (size - 1) == 0 and texts.is_contiguous() and candidates.is_contiguous() and logits.is_contiguous()
    # Lengths and places share an int32.
    assert size * (copies.LOOKUP + 1) < 2**31 and size >= copies.LOOKUP
    places = torch.empty((bs, depths), dtype=torch.int32, device=candidates.device)
    lens = torch.empty(bs, dtype=torch.int32, device=candidates.device)
    if bs and depths:
        lanes = min(size // 4, _LANES)
        assert size <= _MOST_PLACES * lanes
        pdl_is_available = pdl.is_available(candidates.device)
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
            LANES=lanes,
            PADDED_DEPTHS=triton.next_power_of_2(depths),
            PADDED=triton.next_power_of_2(k),
            PDL=pdl_is_available,
            num_warps=max(lanes // 32, 1),
            launch_pdl=pdl_is_available,
        )
    return places, lens
