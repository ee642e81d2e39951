"""The target's tokens of sampled requests, drawn without sorting a vocabulary, in one launch.

A row draws from all that min_p leaves, and asks afterwards whether top_k and top_p allow the drawn token, which takes
the number and the mass of the tokens that are likelier. If they do not, none as likely or less is allowed either: the
row draws again among the likelier ones, whose mass it has just computed. What is accepted has the distribution of
`reference.sample_rows.allowed_distribution`.
Source: the rejection sampling of https://flashinfer.ai/2025/03/10/sampling.html, with one pivot instead of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.types import DrawParameters

# Columns that a row's threads read together; lane i of a row is its columns i, i + _TILE, i + 2 * _TILE and so on.
_TILE = 4096
# Tiles in flight.
_STAGES = 2


@triton.jit
def _weigh(logits, num_columns, maximum, rate, least, below, TILE: tl.constexpr, STAGES: tl.constexpr):
    """Of one row, the weights exp((logit - maximum) * rate): for each lane the mass of what is allowed, being at least
    `least` and above `below`; the mass of the whole row; the number of allowed tokens."""
    mass, total = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    count = tl.zeros((TILE,), tl.int32)
    # Nothing is summed across lanes here: the threads would wait for each other in every tile.
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
    """The first place where the sum of `mass` exceeds `threshold`: its `index`, which ascends, and what the threshold
    is above the mass before it; -1 where there is no mass.

    Sums of floats depend on their order, so the crossing may be missed by a rounding error: then it is the last mass.
    """
    has_mass = mass > 0
    first = tl.min(tl.where(has_mass & (tl.cumsum(mass, 0) > threshold), index, END))
    crossing = tl.minimum(first, tl.max(tl.where(has_mass, index, -1)))
    return crossing, threshold - tl.sum(tl.where(index < crossing, mass, 0.0))


@triton.jit
def _draw(logits, num_columns, maximum, rate, least, below, mass, uniform, TILE: tl.constexpr, PADDED: tl.constexpr):
    """The column where the mass of what is allowed, lane by lane, crosses the share `uniform` of its sum; -1 where
    there is none."""
    lane, rest = _cross(mass, uniform * tl.sum(mass), tl.arange(0, TILE), TILE)
    tile = tl.arange(0, PADDED)
    column = tile * TILE + lane
    # Of a row without mass, nothing.
    is_inside = (lane >= 0) & (column < num_columns)
    value = tl.load(logits + column, mask=is_inside, other=float("-inf")).to(tl.float32)
    is_allowed = (value >= least) & (value > below)
    weight = tl.where(is_allowed, tl.exp((value - maximum) * rate), 0.0)
    drawn, _ = _cross(weight, rest, tile, PADDED)
    return tl.where(drawn < 0, -1, drawn * TILE + lane)


@triton.jit
def _uniform(seed, row, round_index):
    """Below 1. The generator's counter is the pair of row and round: no two draws of a launch share a number."""
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
    # Greedy.
    if top_k <= 1:
        return
    top_p = tl.load(top_ps + request)
    temperature = tl.load(temperatures + request)
    maximum = tl.load(maxima + row).to(tl.float32)
    rate = 1.0 / temperature
    # -inf without min_p.
    least = maximum + temperature * tl.log(tl.load(min_ps + request))
    below = tl.full((), float("-inf"), tl.float32)
    row_logits = logits + row * row_stride
    row_seed = tl.load(seed)
    token = tl.full((), -1, tl.int32)
    round_index = tl.full((), 0, tl.int32)
    is_filtered = (top_k < num_columns) | (top_p < 1.0)
    is_open = top_k > 1
    # Ends: `below` rises to a larger logit every time, and the largest has nothing above it to be rejected for.
    while is_open:
        mass, total, count = _weigh(row_logits, num_columns, maximum, rate, least, below, TILE, STAGES)
        # Nothing has been drawn before the first pass.
        is_accepted = (round_index > 0) & (count < top_k) & ((tl.sum(mass) < top_p * total) | (top_p >= 1.0))
        if is_accepted == 0:
            uniform = _uniform(row_seed, row_index, round_index)
            token = _draw(row_logits, num_columns, maximum, rate, least, below, mass, uniform, TILE, PADDED_TILES)
            below = tl.load(row_logits + token, mask=token >= 0, other=float("-inf")).to(tl.float32)
            round_index += 1
        is_open = (is_accepted == 0) & is_filtered & (token >= 0)
    # Where the maximum is infinite, there is nothing to draw from.
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
