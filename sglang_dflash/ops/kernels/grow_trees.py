"""Trees of the most probable paths in one launch, a warp a request.

Of the paths that may be taken there is one behind each node, as siblings are taken in the order of their rank. So lane
i of a warp holds the next path behind node i, and the first of equally probable lanes is the one that comes first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.kernels.ordered import LOWEST, from_ordered, to_ordered
from sglang_dflash.types import Trees

# A warp reduces a vector of so many in one instruction, and of fewer in several.
_WARP = 32


@triton.jit
def _grow_trees_kernel(
    bonus_tokens,
    bonus_stride,
    candidates,
    logits,
    log_sums,
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
    row = tl.load(req_pool_indices + request)
    candidates += request * DEPTHS * K
    logits += request * DEPTHS * K
    log_sums += request * DEPTHS

    # The place of a candidate is (its depth - 1) * K + its rank. All are read at once: the loop reads some of them one
    # after the other, and then finds them in the cache.
    every = tl.arange(0, PADDED_PLACES)
    log_probs = tl.load(logits + every, mask=every < DEPTHS * K, other=0.0)
    log_probs -= tl.load(log_sums + every // K, mask=every < DEPTHS * K, other=0.0)
    first = tl.max(tl.where((every == 0) & (DEPTHS > 0), to_ordered(log_probs), LOWEST))

    lane = tl.arange(0, WIDTH)
    # Of the next path behind each node: its last place, how probable it is without that, and with it.
    next_place = lane * 0
    base = lane * 0.0
    key = tl.where(lane == 0, first, LOWEST)
    # Of each node.
    place = lane * 0 - 1
    parent = lane * 0 - 1
    # Bits of the nodes below 32 and of the others.
    low = tl.where(lane < 32, 1 << (lane & 31), 0)
    high = tl.where(lane < 32, 0, 1 << (lane & 31))
    for node in range(1, NUM_NODES):
        best = tl.max(key)
        is_node = best != LOWEST
        # The first lane, and its place along with it.
        taken = tl.min(tl.where(key == best, (lane << PLACE_BITS) | next_place, WIDTH << PLACE_BITS))
        taken_lane, taken_place = taken >> PLACE_BITS, taken & ((1 << PLACE_BITS) - 1)
        is_own = (lane == node) & is_node
        place = tl.where(is_own, taken_place, place)
        parent = tl.where(is_own, taken_lane, parent)
        low |= tl.where(is_own, tl.sum(tl.where(lane == taken_lane, low, 0)), 0)
        if WIDTH > 32:
            high |= tl.where(is_own, tl.sum(tl.where(lane == taken_lane, high, 0)), 0)

        is_sibling = (lane == taken_lane) & is_node
        next_place = tl.where(is_sibling, taken_place + 1, next_place)
        next_place = tl.where(is_own, (taken_place // K + 1) * K, next_place)
        base = tl.where(is_own, from_ordered(best), base)
        has_sibling = is_bush & ((taken_place + 1) % K != 0)
        has_child = taken_place // K + 1 < DEPTHS
        is_new = (is_sibling & has_sibling) | (is_own & has_child)
        log_prob = tl.load(logits + next_place, mask=is_new, other=0.0)
        log_prob -= tl.load(log_sums + next_place // K, mask=is_new, other=0.0)
        key = tl.where(is_sibling | is_own, LOWEST, key)
        key = tl.where(is_new, to_ordered(base + log_prob), key)

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
    # As many bits as `ancestors` have.
    assert num_nodes <= 64
    _grow_trees_kernel[(num_requests,)](
        bonus_tokens,
        bonus_tokens.stride(0),
        candidates.contiguous(),
        logits.contiguous(),
        log_sums.contiguous(),
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
