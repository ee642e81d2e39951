"""Trees of the most probable paths in one launch, one warp per request.

The children of a node are taken in the order of their probability, so each node has one next path at a time. Lane i of
a warp holds the next path after node i. Of equally probable paths, that of the first lane is taken. Candidates of a
depth are sorted by probability. After a node, some of them count `exp(LOG_WEIGHT)` times as much. So the next candidate
is the first one that does, or the first one that does not.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sglang_dflash.ops import bigrams
from sglang_dflash.ops.kernels.add_bigrams import TABLE_SIZE, locate
from sglang_dflash.ops.kernels.ordered import LOWEST, from_ordered, to_ordered
from sglang_dflash.types import Trees

# A warp reduces a vector of this size in one instruction, and a smaller one in several.
_WARP = 32
_LOG_WEIGHT = tl.constexpr(bigrams.LOG_WEIGHT)
_MORE_WEIGHT = tl.constexpr(math.expm1(bigrams.LOG_WEIGHT))


@triton.jit
def _first(ranks):
    """Return the lowest set bit of 16; 30 if none is set."""
    bits = ranks | (1 << 30)
    # The exponent of a power of two.
    return ((bits & -bits).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _log_prob(logits, log_sums, depth, rank, mask, K: tl.constexpr):
    """Load the log probability of a candidate at a depth, counted from 0. NaN and inf become -inf."""
    logit = tl.load(logits + depth * K + rank, mask=mask, other=0.0)
    log_prob = logit - tl.load(log_sums + depth, mask=mask, other=0.0)
    return tl.where(log_prob < float("inf"), log_prob, float("-inf"))


@triton.jit
def _grow_trees_kernel(
    bonus_tokens,
    bonus_stride,
    candidates,
    logits,
    log_sums,
    bigram_tables,
    is_chain,
    seq_lens,
    req_pool_indices,
    req_to_token,
    req_to_token_stride,
    tokens,
    positions,
    out_cache_loc,
    parents,
    ancestors,
    NUM_NODES: tl.constexpr,
    DEPTHS: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_PLACES: tl.constexpr,
    PLACE_BITS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    bonus = tl.load(bonus_tokens + request * bonus_stride)
    is_bush = tl.load(is_chain + request) == 0
    seq_len = tl.load(seq_lens + request)
    row = tl.load(req_pool_indices + request).to(tl.int64)
    candidates += request * DEPTHS * K
    logits += request * DEPTHS * K
    log_sums += request * DEPTHS
    bigram_tables += row * TABLE_SIZE

    # The place of a candidate is its depth, from 0 on, * K + its rank. For each place: a bit for every candidate of the
    # next depth that follows it in the text, and the logarithm of the next depth's new sum. All are loaded at once. The
    # loop loads some of them again, one after the other, and finds them in the cache.
    every = tl.arange(0, PADDED_PLACES)
    next_depth = every // K + 1
    is_before = next_depth < DEPTHS
    before = tl.load(candidates + every, mask=is_before, other=0)
    seen = every * 0
    mass = every * 0.0
    for rank in tl.static_range(K):
        slot, tag = locate(before, tl.load(candidates + next_depth * K + rank, mask=is_before, other=0))
        is_seen = (tl.load(bigram_tables + slot, mask=is_before, other=0) == tag) & is_before
        log_prob = _log_prob(logits, log_sums, next_depth, rank, is_before, K)
        seen |= tl.where(is_seen, 1 << rank, 0)
        mass += tl.where(is_seen, tl.exp(log_prob), 0.0)
    # As integers, which a warp adds up in one instruction.
    shift = tl.log(mass * _MORE_WEIGHT + 1.0).to(tl.int32, bitcast=True)

    lane = tl.arange(0, WIDTH)
    # For each node: the candidates after it that are left, and those of them that the text has; the path's log
    # probability up to the node; and log probability and place of the next path.
    left = tl.where(lane == 0, tl.where(is_bush, (1 << K) - 1, 1), 0)
    liked = lane * 0
    base = lane * 0.0
    first_log_prob = _log_prob(logits, log_sums, lane * 0, lane * 0, (lane == 0) & (DEPTHS > 0), K)
    key = tl.where((lane == 0) & (DEPTHS > 0), to_ordered(first_log_prob), LOWEST)
    next_place = lane * 0
    # Candidate and parent of each node.
    place = lane * 0 - 1
    parent = lane * 0 - 1
    # Nodes that a node sees: bits of nodes below 32, and of the others.
    low = tl.where(lane < 32, 1 << (lane & 31), 0)
    high = tl.where(lane < 32, 0, 1 << (lane & 31))
    for node in range(1, NUM_NODES):
        best = tl.max(key)
        is_node = best != LOWEST
        # The first lane with the best path, and that path's place.
        taken = tl.min(tl.where(key == best, (lane << PLACE_BITS) | next_place, WIDTH << PLACE_BITS))
        taken_lane, taken_place = taken >> PLACE_BITS, taken & ((1 << PLACE_BITS) - 1)
        is_own = (lane == node) & is_node
        place = tl.where(is_own, taken_place, place)
        parent = tl.where(is_own, taken_lane, parent)
        low |= tl.where(is_own, tl.sum(tl.where(lane == taken_lane, low, 0)), 0)
        if WIDTH > 32:
            high |= tl.where(is_own, tl.sum(tl.where(lane == taken_lane, high, 0)), 0)

        is_parent = (lane == taken_lane) & is_node
        left = tl.where(is_parent, left & ~(1 << (taken_place % K)), left)
        left = tl.where(is_own, tl.where(is_bush, (1 << K) - 1, 1), left)
        liked = tl.where(is_own, tl.sum(tl.where(every == taken_place, seen, 0)), liked)
        own_shift = tl.sum(tl.where(every == taken_place, shift, 0)).to(tl.float32, bitcast=True)
        base = tl.where(is_own, from_ordered(best) - own_shift, base)
        depth = tl.where(is_own, taken_place // K + 1, taken_place // K)
        is_new = (is_parent | is_own) & (left != 0) & (depth < DEPTHS)
        liked_rank, other_rank = _first(left & liked), _first(left & ~liked)
        is_liked, is_other = is_new & (liked_rank < K), is_new & (other_rank < K)
        liked_key = to_ordered(base + (_log_prob(logits, log_sums, depth, liked_rank, is_liked, K) + _LOG_WEIGHT))
        other_key = to_ordered(base + _log_prob(logits, log_sums, depth, other_rank, is_other, K))
        is_first = (liked_key > other_key) | ((liked_key == other_key) & (liked_rank < other_rank))
        is_liked &= is_first | ~is_other
        key = tl.where(is_parent | is_own, LOWEST, key)
        key = tl.where(is_new, tl.where(is_liked, liked_key, other_key), key)
        next_place = tl.where(is_new, depth * K + tl.where(is_liked, liked_rank, other_rank), next_place)

    valid = lane < NUM_NODES
    out = request * NUM_NODES + lane
    is_draft = place >= 0
    token = tl.load(candidates + place, mask=is_draft, other=0)
    tl.store(tokens + out, tl.where(is_draft, token, bonus), mask=valid)
    tl.store(positions + out, seq_len + tl.where(is_draft, place // K + 1, 0), mask=valid)
    slot = tl.load(req_to_token + row * req_to_token_stride + seq_len + lane, mask=valid, other=0)
    tl.store(out_cache_loc + out, slot.to(tl.int64), mask=valid)
    tl.store(parents + out, parent.to(tl.int64), mask=valid)
    tl.store(ancestors + out, (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF), mask=valid)


def grow_trees(
    bonus_tokens: torch.Tensor,
    candidates: torch.Tensor,
    logits: torch.Tensor,
    log_sums: torch.Tensor,
    bigram_tables: torch.Tensor,
    is_chain: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    trees: Trees,
) -> None:
    """See :func:`sglang_dflash.ops.reference.grow_trees.grow_trees`."""
    num_requests, num_nodes = trees.parents.shape
    if num_requests == 0:
        return
    depths, k = candidates.shape[1:]
    # `ancestors` has 64 bits, and `left` a bit for every candidate.
    assert num_nodes <= 64 and k <= 16
    _grow_trees_kernel[(num_requests,)](
        bonus_tokens,
        bonus_tokens.stride(0),
        candidates.contiguous(),
        logits.contiguous(),
        log_sums.contiguous(),
        bigram_tables,
        is_chain,
        seq_lens,
        req_pool_indices,
        req_to_token,
        req_to_token.stride(0),
        trees.tokens,
        trees.positions,
        trees.out_cache_loc,
        trees.parents,
        trees.ancestors,
        NUM_NODES=num_nodes,
        DEPTHS=depths,
        K=k,
        WIDTH=max(_WARP, triton.next_power_of_2(num_nodes)),
        PADDED_PLACES=max(_WARP, triton.next_power_of_2(depths * k)),
        PLACE_BITS=(depths * k).bit_length(),
        num_warps=1,
    )
