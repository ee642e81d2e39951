"""Copies of the request's own text in the table of conditionals, in one launch with a warp for each position."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops import copies

_DOUBT = tl.constexpr(copies.DOUBT)
_MAX_WEIGHT = tl.constexpr(copies.MAX_WEIGHT)
_LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def _weigh_copies_kernel(log_probs, ranks, places, lens, DEPTHS: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    depth = tl.program_id(1)
    place = tl.load(places + request * DEPTHS + depth)
    if place >= 0:
        before = tl.load(places + request * DEPTHS + depth - 1, mask=depth > 0, other=0)
        table = (request * DEPTHS + depth) * K * K
        column = tl.arange(0, PADDED)
        is_candidate = column < K
        entry = table + before * K + column
        log_prob = tl.load(log_probs + entry, mask=is_candidate, other=_LOWEST)
        rank = tl.load(ranks + entry, mask=is_candidate, other=0)
        matching = (tl.load(lens + request) + depth).to(tl.float32)
        weight = tl.minimum(matching / (matching + _DOUBT), _MAX_WEIGHT)
        is_copy = is_candidate & (rank == place)
        copied = tl.log(weight + (1.0 - weight) * tl.exp(log_prob))
        changed = tl.where(is_copy, copied, log_prob + tl.log(1.0 - weight))
        # The copy's token moves to the front of those that are less probable now. The others stay in their order.
        own = tl.sum(tl.where(is_copy, copied, 0.0))
        at = tl.sum(tl.where(is_copy, column, 0))
        is_passed = (column < at) & (changed < own)
        new_column = tl.where(is_copy, at - tl.sum(is_passed.to(tl.int32)), column + is_passed.to(tl.int32))
        # All rows of the first position belong to the bonus token.
        row = tl.arange(0, PADDED)
        is_row = (row < K) & ((row == before) | (depth == 0))
        out = table + row[:, None] * K + new_column[None, :]
        mask = is_row[:, None] & is_candidate[None, :]
        tl.store(log_probs + out, tl.broadcast_to(changed[None, :], (PADDED, PADDED)), mask=mask)
        tl.store(ranks + out, tl.broadcast_to(rank[None, :], (PADDED, PADDED)), mask=mask)


def weigh_copies(log_probs: torch.Tensor, ranks: torch.Tensor, places: torch.Tensor, lens: torch.Tensor) -> None:
    """See :func:`sglang_dflash.ops.reference.weigh_copies.weigh_copies`."""
    bs, depths, k = log_probs.shape[:3]
    assert log_probs.is_contiguous() and ranks.is_contiguous()
    if log_probs.numel():
        _weigh_copies_kernel[(bs, depths)](
            log_probs, ranks, places, lens, DEPTHS=depths, K=k, PADDED=triton.next_power_of_2(k), num_warps=1
        )
