"""Trees of the most probable paths in one launch, a warp a request.

Lane i of a warp holds the next path after node i: the most probable one that is not taken yet. A row of the table
descends, so a lane only counts how many of its row are taken. The path that is taken next is the largest of the lanes;
of equals it is the one of the first lane.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sglang_dflash.ops.kernels import pdl
from sglang_dflash.ops.kernels.ordered import LOWEST, from_ordered, to_ordered
from sglang_dflash.types import Trees

# A warp reduces a vector of this many lanes in one instruction, and a shorter one in several.
_WARP = 32
# All do the same, but for the first reading of the table.
_WARPS = 4
# Entries of the table that are read before the walk.
_MOST_ENTRIES = 4096
# No table has it, as its numbers are none.
_NEVER = tl.constexpr(2**31 - 1)


@triton.jit
def _key(log_prob, is_path):
    """Return a path's order as int32; LOWEST where there is no path, or an impossible one."""
    return tl.where(is_path & (log_prob > float("-inf")), to_ordered(log_prob), LOWEST)


@triton.jit
def _grow_trees_kernel(
    bonus_tokens,
    bonus_stride,
    candidates,
    log_probs,
    ranks,
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
    PADDED_TABLE: tl.constexpr,
    PLACE_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    # It does not let the next kernel begin early, which makes the walk slower.
    if PDL:
        gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    bonus = tl.load(bonus_tokens + request * bonus_stride)
    num_children = tl.where(tl.load(is_chain + request) == 0, K, 1)
    seq_len = tl.load(seq_lens + request)
    row = tl.load(req_pool_indices + request).to(tl.int64)
    candidates += request * DEPTHS * K
    log_probs += request * DEPTHS * K * K
    ranks += request * DEPTHS * K * K

    lane = tl.arange(0, WIDTH)
    valid = lane < NUM_NODES
    slot = tl.load(req_to_token + row * req_to_token_stride + seq_len + lane, mask=valid, other=0)
    # The walk waits for each of its loads. They find the table in L1, because its first positions are read here.
    entries = tl.arange(0, PADDED_TABLE)
    is_entry = entries < DEPTHS * K * K
    read = tl.load(log_probs.to(tl.pointer_type(tl.int32)) + entries, mask=is_entry, other=0)
    read = tl.max(read | tl.load(ranks + entries, mask=is_entry, other=0))
    # A lane's row of the table, how many of it are taken, and the log probability of the path up to its node.
    table_row = lane * 0
    num_taken = lane * 0
    base = lane * 0.0
    # The next path of a lane, and its place: position * K + candidate.
    is_root = (lane == 0) & (DEPTHS > 0) & (read != _NEVER)
    key = _key(tl.load(log_probs + lane * 0, mask=is_root, other=0.0), is_root)
    next_place = tl.load(ranks + lane * 0, mask=is_root, other=0).to(tl.int32)
    # A node's own place and parent; -1 for the root and for padding.
    place = lane * 0 - 1
    parent = lane * 0 - 1
    # Bits of the nodes below 32, and of the others.
    low = tl.where(lane < 32, 1 << (lane & 31), 0)
    high = tl.where(lane < 32, 0, 1 << (lane & 31))
    for node in range(1, NUM_NODES):
        best = tl.max(key)
        is_node = best != LOWEST
        # The first lane, with its place.
        taken = tl.min(tl.where(key == best, (lane << PLACE_BITS) | next_place, WIDTH << PLACE_BITS))
        taken_lane, taken_place = taken >> PLACE_BITS, taken & ((1 << PLACE_BITS) - 1)
        is_own = (lane == node) & is_node
        place = tl.where(is_own, taken_place, place)
        parent = tl.where(is_own, taken_lane, parent)
        low |= tl.where(is_own, tl.sum(tl.where(lane == taken_lane, low, 0)), 0)
        if WIDTH > 32:
            high |= tl.where(is_own, tl.sum(tl.where(lane == taken_lane, high, 0)), 0)

        is_parent = (lane == taken_lane) & is_node
        num_taken += is_parent.to(tl.int32)
        # Rows of the next position come after those of this one.
        table_row = tl.where(is_own, taken_place + K, table_row)
        base = tl.where(is_own, from_ordered(best), base)
        is_changed = is_parent | is_own
        has_next = is_changed & (num_taken < num_children) & (table_row < DEPTHS * K)
        entry = table_row * K + num_taken
        log_prob = base + tl.load(log_probs + entry, mask=has_next, other=0.0)
        rank = tl.load(ranks + entry, mask=has_next, other=0).to(tl.int32)
        key = tl.where(is_changed, _key(log_prob, has_next), key)
        next_place = tl.where(is_changed, table_row // K * K + rank, next_place)

    out = request * NUM_NODES + lane
    is_draft = place >= 0
    token = tl.load(candidates + place, mask=is_draft, other=0)
    tl.store(tokens + out, tl.where(is_draft, token, bonus), mask=valid)
    tl.store(positions + out, seq_len + tl.where(is_draft, place // K + 1, 0), mask=valid)
    tl.store(out_cache_loc + out, slot.to(tl.int64), mask=valid)
    tl.store(parents + out, parent.to(tl.int64), mask=valid)
    tl.store(ancestors + out, (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF), mask=valid)


def grow_trees(
    bonus_tokens: torch.Tensor,
    candidates: torch.Tensor,
    log_probs: torch.Tensor,
    ranks: torch.Tensor,
    is_chain: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    trees: Trees,
) -> None:
    """See :func:`sglang_dflash.ops.reference.grow_trees.grow_trees`."""
    bs, num_nodes = trees.parents.shape
    if bs == 0:
        return
    depths, k = candidates.shape[1:]
    # As many bits as `ancestors` have, and a rank's uint8.
    assert num_nodes <= 64 and k <= 256
    pdl_is_available = pdl.is_available(candidates.device)
    _grow_trees_kernel[(bs,)](
        bonus_tokens,
        bonus_tokens.stride(0),
        candidates.contiguous(),
        log_probs,
        ranks,
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
        PADDED_TABLE=min(triton.next_power_of_2(max(depths * k * k, 1)), _MOST_ENTRIES),
        PLACE_BITS=(depths * k).bit_length(),
        PDL=pdl_is_available,
        num_warps=_WARPS,
        launch_pdl=pdl_is_available,
    )
