"""Conditional log probabilities of drafts whose drafter scores pairs, a program for each position of a request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops import bigrams
from sglang_dflash.ops.kernels import pdl
from sglang_dflash.ops.kernels.add_bigrams import TABLE_SIZE, locate
from sglang_dflash.ops.kernels.fill_table import as_number, descending_places
from sglang_dflash.ops.kernels.gumbel import gumbel, hash_prefix
from sglang_dflash.ops.kernels.weigh_copies import load_copy, weigh_copies
from sglang_dflash.types import DrawParameters, PairVectors

_LOG_WEIGHT = tl.constexpr(bigrams.LOG_WEIGHT)
_LOWEST = tl.constexpr(float("-inf"))
# The bits of a float32 that tensor cores read: all but the last 13.
_HIGH_BITS = tl.constexpr(-(2**13))
# A dimension of a product has at least this many numbers. Also the most candidates.
_PADDED = 16
# Numbers of a vector that a warp multiplies at a time.
_NUMBERS = 64
_WARPS = 4
# The loads of one step fewer than this are on the way at the same time. Vectors of rank 256 take one step.
_STAGES = 3


@triton.jit
def _add_product(right, left, products, HAS_GATES: tl.constexpr):
    """Return `products` plus right times left, in the precision of float32.

    Tensor cores read 11 significant bits of a float32. A number of bfloat16 or float16 has no more. Its product with a
    gate has no more than 22, and is divided into two parts.

    Args:
        right: [PARTS, PADDED, NUMBERS]. Vectors of any dtype.
        left: the same shape, float32. Vectors of the same dtype, times gates if HAS_GATES.
        products: [PARTS, PADDED, PADDED] float32.
    """
    left = tl.permute(left, (0, 2, 1))
    if right.dtype == tl.float32:
        return tl.dot(right, left, products, input_precision="tf32x3")
    right = right.to(tl.float32)
    if HAS_GATES:
        high = (left.to(tl.int32, bitcast=True) & _HIGH_BITS).to(tl.float32, bitcast=True)
        products = tl.dot(right, left - high, products, input_precision="tf32")
        left = high
    return tl.dot(right, left, products, input_precision="tf32")


@triton.jit
def _fill_pair_table_kernel(
    bonus_tokens,
    bonus_stride,
    candidates,
    logits,
    before_vectors,
    after_vectors,
    gates,
    gates_request_stride,
    gates_depth_stride,
    gates_candidate_stride,
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
    num_children,
    DEPTHS: tl.constexpr,
    K: tl.constexpr,
    RANK: tl.constexpr,
    HAS_GATES: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    NUMBERS: tl.constexpr,
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
    # Rows of the table belong to the candidates of the position before, or all to the bonus token.
    has_before = is_candidate & (depth > 0)
    bonus = tl.load(bonus_tokens + request * bonus_stride)
    before = tl.where(depth > 0, tl.load(candidates + (row - 1) * K + column, mask=has_before, other=0), bonus)

    # Everything that is read later is on the way before the products wait for their vectors.
    logit = tl.load(logits + row * K + column, mask=is_candidate, other=_LOWEST)
    is_sampled = (tl.load(top_ks + request) > 1) & (tl.load(is_chain + request) == 0)
    temperature, key, seq_len = tl.load(temperatures + request), tl.load(keys + request), tl.load(seq_lens + request)
    slot, tag = locate(before[None, :], token[:, None])
    is_pair = is_candidate[:, None] & has_before[None, :]
    slots = bigram_tables + tl.load(req_pool_indices + request).to(tl.int64) * TABLE_SIZE
    found = tl.load(slots + slot, mask=is_pair, other=0)
    if HAS_COPIES:
        copy = load_copy(places, lens, request, depth, DEPTHS)

    # Each warp multiplies a part of the numbers.
    part = tl.arange(0, PARTS)[:, None, None] * NUMBERS
    products = tl.zeros([PARTS, PADDED, PADDED], tl.float32)
    for start in range(0, RANK, PARTS * NUMBERS):
        number = start + part + tl.arange(0, NUMBERS)[None, None, :]
        is_number = is_candidate[None, :, None] & (number < RANK)
        right = tl.load(after_vectors + token[None, :, None] * RANK + number, mask=is_number, other=0.0)
        left = tl.load(before_vectors + before[None, :, None] * RANK + number, mask=is_number, other=0.0)
        left = left.to(tl.float32)
        if HAS_GATES:
            gate = gates + request * gates_request_stride + depth.to(tl.int64) * gates_depth_stride
            gate += column[None, :, None] * gates_candidate_stride + number
            left *= tl.load(gate, mask=is_number, other=0.0).to(tl.float32)
        products = _add_product(right, left, products, HAS_GATES)
    # Rows of the table are columns of these tiles.
    product = tl.sum(products, axis=0)

    score = logit[:, None] + product
    if is_sampled:
        score += (temperature * gumbel(hash_prefix(key, seq_len + depth), token))[:, None]
    score = tl.where(is_candidate[:, None], as_number(score), _LOWEST)
    score += tl.where((found == tag) & is_pair, _LOG_WEIGHT, 0.0)
    largest = tl.max(score, axis=0)
    total = tl.sum(tl.exp(score - largest[None, :]), axis=0)
    score = as_number(score - (largest + tl.log(total))[None, :])

    place = descending_places(score, column, is_candidate)
    score = tl.where(place < num_children, score, _LOWEST)
    if HAS_COPIES:
        score = weigh_copies(score, *copy, depth, column, column)
        place = descending_places(score, column, is_candidate)
    out = (row * K + column[None, :]) * K + place
    mask = is_candidate[:, None] & is_candidate[None, :]
    tl.store(log_probs + out, score, mask=mask)
    tl.store(ranks + out, tl.broadcast_to(column[:, None], (PADDED, PADDED)).to(tl.uint8), mask=mask)


def fill_pair_table(
    bonus_tokens: torch.Tensor,
    candidates: torch.Tensor,
    logits: torch.Tensor,
    vectors: PairVectors,
    num_children: int,
    parameters: DrawParameters,
    keys: torch.Tensor,
    bigram_tables: torch.Tensor,
    is_chain: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    places: torch.Tensor | None = None,
    lens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`sglang_dflash.ops.reference.fill_pair_table.fill_pair_table`."""
    bs, depths, k = candidates.shape
    log_probs = torch.empty((bs, depths, k, k), dtype=torch.float32, device=candidates.device)
    ranks = torch.empty(log_probs.shape, dtype=torch.uint8, device=candidates.device)
    if not log_probs.numel():
        return log_probs, ranks
    assert k <= _PADDED and vectors.before.is_contiguous() and vectors.after.is_contiguous()
    gates = vectors.gates
    assert gates is None or gates.stride(3) == 1
    pdl_is_available = pdl.is_available(candidates.device)
    _fill_pair_table_kernel[(bs, depths)](
        bonus_tokens,
        bonus_tokens.stride(0),
        candidates.contiguous(),
        logits.contiguous(),
        vectors.before,
        vectors.after,
        # Any valid pointer will do where there are none, here and below.
        vectors.before if gates is None else gates,
        *((0, 0, 0) if gates is None else gates.stride()[:3]),
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
        num_children,
        DEPTHS=depths,
        K=k,
        RANK=vectors.before.shape[1],
        HAS_GATES=gates is not None,
        PADDED=_PADDED,
        PARTS=_WARPS,
        NUMBERS=_NUMBERS,
        HAS_COPIES=places is not None,
        PDL=pdl_is_available,
        num_warps=_WARPS,
        num_stages=_STAGES,
        launch_pdl=pdl_is_available,
    )
    return log_probs, ranks
