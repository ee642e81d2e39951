"""Sampling of the target's tokens without sorting the vocabulary, in one launch.

A row samples from all tokens that min_p leaves. Then it checks top_k and top_p for the sampled token, for which it
computes the number and the mass of the more likely tokens. If the token is rejected, no token of its likelihood or
less is allowed. So the row samples again among the more likely tokens, whose mass it has just computed. Accepted
tokens have the distribution of `reference.sample_rows.allowed_distribution`.
Source: the rejection sampling of https://flashinfer.ai/2025/03/10/sampling.html, with one pivot instead of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.types import DrawParameters

# Columns that a thread block reads together. Lane i of a row reads columns i, i + _TILE, i + 2 * _TILE and so on.
_TILE = 4096
# Tiles in flight.
_STAGES = 2


@triton.jit
def _weigh(logits, num_columns, maximum, rate, least, below, TILE: tl.constexpr, STAGES: tl.constexpr):
    """Sum the weights exp((logit - maximum) * rate) of one row. A logit is allowed if it is >= `least` and > `below`.

    Returns:
        The allowed mass of each lane, the mass of the whole row, and the number of allowed tokens.
    """
    mass, total = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    count = tl.zeros((TILE,), tl.int32)
    # Lanes are summed after the loop. A sum in every tile would make the threads wait for each other.
    for start in tl.range(0, num_columns, TILE, num_stages=STAGES):
        column = start + tl.arange(0, TILE)
        value = tl.load(logits + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
        weight = tl.where(value > float("-inf"), tl.exp((value - maximum) * rate), 0.0)
        is_allowed = (value >= least) & (value > below)
        mass += tl.where(is_allowed, weight, 0.0)
        total += weight
        count += is_allowed.to(tl.int32)
    return mass, tl.sum(total), tl.sum(count)


@triton.jit
def _cross(mass, threshold, index, END: tl.constexpr):
    """Find the first entry where the running sum of `mass` exceeds `threshold`.

    Rounding may keep the sum below the threshold; then the last entry with mass is returned.

    Returns:
        The `index` of that entry, -1 if there is no mass; `index` ascends.
        The threshold minus the mass before that entry.
    """
    has_mass = mass > 0
    first = tl.min(tl.where(has_mass & (tl.cumsum(mass, 0) > threshold), index, END))
    crossing = tl.minimum(first, tl.max(tl.where(has_mass, index, -1)))
    return crossing, threshold - tl.sum(tl.where(index < crossing, mass, 0.0))


@triton.jit
def _draw(logits, num_columns, maximum, rate, least, below, mass, uniform, TILE: tl.constexpr, PADDED: tl.constexpr):
    """Return the column where the allowed mass, summed lane by lane, exceeds `uniform` times its total.

    Returns -1 if there is no mass.
    """
    lane, rest = _cross(mass, uniform * tl.sum(mass), tl.arange(0, TILE), TILE)
    tile = tl.arange(0, PADDED)
    column = tile * TILE + lane
    # The lane is -1 if the row has no mass.
    is_inside = (lane >= 0) & (column < num_columns)
    value = tl.load(logits + column, mask=is_inside, other=float("-inf")).to(tl.float32)
    is_allowed = (value >= least) & (value > below)
    weight = tl.where(is_allowed, tl.exp((value - maximum) * rate), 0.0)
    drawn, _ = _cross(weight, rest, tile, PADDED)
    return tl.where(drawn < 0, -1, drawn * TILE + lane)


@triton.jit
def _uniform(seed, row, round_index):
    """Return a number in [0, 1). The counter is the pair of row and round, so no two draws of a launch share it."""
    zero = round_index * 0
    bits, _, _, _ = tl.philox(seed, row, round_index, zero, zero)
    return tl.uint_to_uniform_float(bits)


@triton.jit
def _sample_rows_kernel(
    logits,
    row_stride,
    num_columns,
    block_size,
    maxima,
    tokens,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seed,
    TILE: tl.constexpr,
    PADDED_TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    row_index = tl.program_id(0)
    row = row_index.to(tl.int64)
    request = row // block_size
    top_k = tl.load(top_ks + request)
    # A greedy request keeps its argmax.
    if top_k <= 1:
        return
    top_p = tl.load(top_ps + request)
    temperature = tl.load(temperatures + request)
    maximum = tl.load(maxima + row).to(tl.float32)
    rate = 1.0 / temperature
    # log(0) is -inf: without min_p every token passes.
    least = maximum + temperature * tl.log(tl.load(min_ps + request))
    below = tl.full((), float("-inf"), tl.float32)
    row_logits = logits + row * row_stride
    row_seed = tl.load(seed)
    token = tl.full((), -1, tl.int32)
    round_index = tl.full((), 0, tl.int32)
    is_filtered = (top_k < num_columns) | (top_p < 1.0)
    is_open = top_k > 1
    # This ends: `below` rises to a larger logit every time, and the largest logit cannot be rejected.
    while is_open:
        mass, total, count = _weigh(row_logits, num_columns, maximum, rate, least, below, TILE, STAGES)
        # The first pass has no token to accept yet.
        is_accepted = (round_index > 0) & (count < top_k) & ((tl.sum(mass) < top_p * total) | (top_p >= 1.0))
        if is_accepted == 0:
            uniform = _uniform(row_seed, row_index, round_index)
            token = _draw(row_logits, num_columns, maximum, rate, least, below, mass, uniform, TILE, PADDED_TILES)
            below = tl.load(row_logits + token, mask=token >= 0, other=float("-inf")).to(tl.float32)
            round_index += 1
        is_open = (is_accepted == 0) & is_filtered & (token >= 0)
    # A row with an infinite maximum keeps its token.
    tl.store(tokens + row, token.to(tl.int64), mask=token >= 0)


def sample_rows(
    logits: torch.Tensor, maxima: torch.Tensor, tokens: torch.Tensor, parameters: DrawParameters, seed: torch.Tensor
) -> None:
    """See :func:`sglang_dflash.ops.reference.sample_rows.sample_rows`."""
    num_rows, num_columns = logits.shape
    if num_rows == 0:
        return
    _sample_rows_kernel[(num_rows,)](
        logits=logits,
        row_stride=logits.stride(0),
        num_columns=num_columns,
        block_size=num_rows // parameters.top_ks.shape[0],
        maxima=maxima,
        tokens=tokens,
        temperatures=parameters.temperatures,
        top_ks=parameters.top_ks,
        top_ps=parameters.top_ps,
        min_ps=parameters.min_ps,
        seed=seed,
        TILE=_TILE,
        PADDED_TILES=triton.next_power_of_2(triton.cdiv(num_columns, _TILE)),
        STAGES=_STAGES,
        num_warps=8,
    )
