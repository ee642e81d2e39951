"""Conditional log probabilities of drafts in one launch, a warp for a few rows of the table."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sglang_dflash.ops import bigrams
from sglang_dflash.ops.kernels import pdl
from sglang_dflash.ops.kernels.add_bigrams import TABLE_SIZE, locate
from sglang_dflash.ops.kernels.gumbel import gumbel, hash_prefix
from sglang_dflash.ops.kernels.ordered import to_ordered
from sglang_dflash.ops.kernels.weigh_copies import load_copy, weigh_copies
from sglang_dflash.ops.reference import fill_table as reference
from sglang_dflash.types import DrawParameters

_LOG_WEIGHT = tl.constexpr(bigrams.LOG_WEIGHT)
_MORE_WEIGHT = tl.constexpr(math.expm1(bigrams.LOG_WEIGHT))
_EULER = tl.constexpr(reference.EULER)
_LOWEST = tl.constexpr(float("-inf"))
# Rows of the table that a program fills.
_ROWS = 8


@triton.jit
def as_number(x):
    """Return x, and -inf for NaN."""
    return tl.where(x == x, x, _LOWEST)


@triton.jit
def descending_places(score, column, is_candidate):
    """Return the place of each score in its column of the tile, descending: the number of those that come before it.

    Of equal scores the earlier row of the tile comes first. Padding comes last.

    Args:
        score: [PADDED, ROWS]. A row of the table of conditionals is a column here, which one lane holds, or a few.
        column: [PADDED]. Numbers of the tile's rows.
        is_candidate: [PADDED] bool. False: padding.
    """
    key = to_ordered(score)
    is_earlier = (column[:, None] < column[None, :]).to(tl.int32)[:, :, None]
    comes_first = (key[:, None, :] > key[None, :, :] - is_earlier) & is_candidate[:, None, None]
    return tl.sum(comes_first.to(tl.int32), axis=0)


@triton.jit
def _fill_table_kernel(
    candidates,
    logits,
    log_sums,
    temperatures,
    top_ks,
    keys,
    bigram_tables,
    is_chain,
    seq_lens,
    req_pool_indices,
    places,
    lens,
    log_probs,
    ranks,
    DEPTHS: tl.constexpr,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_COPIES: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait_and_release(PDL)
    request = tl.program_id(0).to(tl.int64)
    depth = tl.program_id(1)
    row = request * DEPTHS + depth
    column = tl.arange(0, PADDED)
    is_candidate = column < K
    token = tl.load(candidates + row * K + column, mask=is_candidate, other=0)
    logit = as_number(tl.load(logits + row * K + column, mask=is_candidate, other=_LOWEST))
    if HAS_SUMS:
        plain = logit - tl.load(log_sums + row)
    else:
        plain = logit - tl.max(logit)
        plain -= tl.log(tl.sum(tl.exp(plain)))
    is_sampled = (tl.load(top_ks + request) > 1) & (tl.load(is_chain + request) == 0)
    temperature = tl.load(temperatures + request)
    prefix = hash_prefix(tl.load(keys + request), tl.load(seq_lens + request) + depth)
    score = as_number(tl.where(is_sampled, plain + temperature * gumbel(prefix, token), plain))
    score = tl.where(is_candidate, score, _LOWEST)
    mass = tl.where(is_candidate, tl.exp(plain), 0.0)
    rest = as_number(tl.log(tl.maximum(1.0 - tl.sum(mass), 0.0)) + temperature * _EULER)

    # Rows of the table are candidates of the position before. They are columns of these tiles.
    above = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_row = above < K
    has_before = is_row & (depth > 0)
    before = tl.load(candidates + (row - 1) * K + above, mask=has_before, other=0)
    slot, tag = locate(before[None, :], token[:, None])
    is_pair = is_candidate[:, None] & has_before[None, :]
    slots = bigram_tables + tl.load(req_pool_indices + request).to(tl.int64) * TABLE_SIZE
    is_seen = (tl.load(slots + slot, mask=is_pair, other=0) == tag) & is_pair
    after = score[:, None] + tl.where(is_seen, _LOG_WEIGHT, 0.0)
    greedy_sum = tl.log(tl.sum(tl.where(is_seen, mass[:, None], 0.0), axis=0) * _MORE_WEIGHT + 1.0)
    largest = tl.maximum(tl.max(after, axis=0), rest)
    total = tl.sum(tl.exp(after - largest[None, :]), axis=0) + tl.exp(rest - largest)
    after = as_number(after - tl.where(is_sampled, largest + tl.log(total), greedy_sum)[None, :])
    if HAS_COPIES:
        copy = load_copy(places, lens, request, depth, DEPTHS)
        after = weigh_copies(after, *copy, depth, column, above)

    out = (row * K + above[None, :]) * K + descending_places(after, column, is_candidate)
    mask = is_candidate[:, None] & is_row[None, :]
    tl.store(log_probs + out, after, mask=mask)
    tl.store(ranks + out, tl.broadcast_to(column[:, None], (PADDED, ROWS)).to(tl.uint8), mask=mask)


def fill_table(
    candidates: torch.Tensor,
    logits: torch.Tensor,
    log_sums: torch.Tensor | None,
    parameters: DrawParameters,
    keys: torch.Tensor,
    bigram_tables: torch.Tensor,
    is_chain: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    places: torch.Tensor | None = None,
    lens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`sglang_dflash.ops.reference.fill_table.fill_table`."""
    bs, depths, k = candidates.shape
    log_probs = torch.empty((bs, depths, k, k), dtype=torch.float32, device=candidates.device)
    ranks = torch.empty(log_probs.shape, dtype=torch.uint8, device=candidates.device)
    if log_probs.numel():
        pdl_is_available = pdl.is_available(candidates.device)
        padded = triton.next_power_of_2(k)
        rows = min(_ROWS, padded)
        _fill_table_kernel[(bs, depths, triton.cdiv(k, rows))](
            candidates.contiguous(),
            logits.contiguous(),
            # Any valid pointer will do where there are none, here and below.
            logits if log_sums is None else log_sums.contiguous(),
            parameters.temperatures,
            parameters.top_ks,
            keys,
            bigram_tables,
            is_chain,
            seq_lens,
            req_pool_indices,
            req_pool_indices if places is None else places,
            req_pool_indices if lens is None else lens,
            log_probs,
            ranks,
            DEPTHS=depths,
            K=k,
            PADDED=padded,
            ROWS=rows,
            HAS_SUMS=log_sums is not None,
            HAS_COPIES=places is not None,
            PDL=pdl_is_available,
            num_warps=1,
            launch_pdl=pdl_is_available,
        )
    return log_probs, ranks
