"""The target's tokens of sampled requests, drawn without sorting a vocabulary, in one launch.

A draw is the argmax of logit / T + noise over the allowed tokens (the Gumbel-max trick, see
:mod:`sglang_dflash.ops.noise`). A row first takes it over all that min_p leaves. It then asks whether top_k and top_p
allow the token, which takes the number and the mass of the tokens that are likelier. If they do not, none as likely or
less is allowed either, and the row draws again among the likelier ones. The last draw is the argmax over the allowed
tokens: each set of this search contains them, and its argmax is one of them.
Source of the search: https://flashinfer.ai/2025/03/10/sampling.html, with one pivot instead of two.

The logarithms of the noise would take longer than the logits take to read. A draw computes an upper bound of each
score first, and the scores only of lanes whose bound reaches the best score so far. For most rows that is one lane.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.kernels.gumbel import gumbel, gumbel_bound, hash_prefix, hash_token
from sglang_dflash.types import DrawParameters

# Columns that a row's threads read together; lane i of a row reads columns i, i + _TILE, i + 2 * _TILE and so on.
_TILE = 4096
# Tiles in flight.
_STAGES = 2


@triton.jit
def _next_above(value):
    """Return the smallest float32 above a finite one."""
    # The sum has no -0.
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return tl.where(value < 0, bits - 1, bits + 1).to(tl.float32, bitcast=True)


@triton.jit
def _draw(
    logits,
    num_columns,
    largest,
    rate,
    prefix,
    least,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return the column of the largest logit * rate + noise, among logits of at least `least`; the first of equals,
    -1 where there is none.

    Args:
        largest: largest logit * rate.
        TILES: a power of two, at least the tiles of a row.
    """
    lane = tl.arange(0, TILE)
    # Upper bound of a lane's scores.
    bounds = tl.full((TILE,), float("-inf"), tl.float32)
    # Nothing is reduced across lanes here: the threads would wait for each other in every tile.
    for start in tl.range(0, num_columns, TILE, num_stages=STAGES):
        column = start + lane
        value = tl.load(logits + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
        bound = value * rate + gumbel_bound(hash_token(prefix, column))
        bounds = tl.where((value >= least) & (bound > bounds), bound, bounds)

    best, best_column = tl.full((), float("-inf"), tl.float32), tl.full((), -1, tl.int32)
    # More than the rounding errors of bounds and scores.
    margin = 0.01 + 4e-7 * tl.abs(largest)
    tile = tl.arange(0, TILES)
    bound = tl.max(bounds)
    # Ends: every turn removes a lane.
    while (bound + margin >= best) & (bound > float("-inf")):
        chosen = tl.min(tl.where(bounds == bound, lane, TILE))
        column = tile * TILE + chosen
        value = tl.load(logits + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
        score = tl.where(value >= least, value * rate + gumbel(prefix, column), float("-inf"))
        top = tl.max(score)
        first = tl.min(tl.where(score == top, column, 2147483647))
        is_better = (top > best) | ((top == best) & (first < best_column))
        best, best_column = tl.where(is_better, top, best), tl.where(is_better, first, best_column)
        bounds = tl.where(lane == chosen, float("-inf"), bounds)
        bound = tl.max(bounds)
    return best_column


@triton.jit
def _weigh(logits, num_columns, maximum, rate, least, TILE: tl.constexpr, STAGES: tl.constexpr):
    """Return, of the weights exp((logit - maximum) * rate), the mass of logits of at least `least`, the mass of the
    row, and how many the former are."""
    mass, total = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    count = tl.zeros((TILE,), tl.int32)
    for start in tl.range(0, num_columns, TILE, num_stages=STAGES):
        column = start + tl.arange(0, TILE)
        value = tl.load(logits + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
        weight = tl.where(value > float("-inf"), tl.exp((value - maximum) * rate), 0.0)
        is_likelier = value >= least
        mass += tl.where(is_likelier, weight, 0.0)
        total += weight
        count += is_likelier.to(tl.int32)
    return tl.sum(mass), tl.sum(total), tl.sum(count)


@triton.jit
def _sample_rows_kernel(
    logits,
    row_stride,
    num_columns,
    rows_per_request,
    maxima,
    tokens,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    keys,
    positions,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request = row // rows_per_request
    top_k = tl.load(top_ks + request)
    maximum = tl.load(maxima + row).to(tl.float32)
    # Greedy, or nothing to draw from.
    if (top_k <= 1) | (maximum == float("inf")) | (maximum == float("-inf")):
        return
    top_p = tl.load(top_ps + request)
    temperature = tl.load(temperatures + request)
    prefix = hash_prefix(tl.load(keys + request), tl.load(positions + row))
    rate = 1.0 / temperature
    # -inf without min_p.
    least = maximum + temperature * tl.log(tl.load(min_ps + request))
    row_logits = logits + row * row_stride
    token = tl.full((), -1, tl.int32)
    is_filtered = (top_k < num_columns) | (top_p < 1.0)
    is_open = top_k > 1
    # Ends: `least` rises to a larger logit every time, and the largest has nothing above it to be rejected for.
    while is_open:
        token = _draw(row_logits, num_columns, maximum * rate, rate, prefix, least, TILE, TILES, STAGES)
        drawn = tl.load(row_logits + token, mask=token >= 0, other=float("inf")).to(tl.float32)
        is_open = is_filtered & (drawn < maximum)
        if is_open:
            least = _next_above(drawn)
            mass, total, count = _weigh(row_logits, num_columns, maximum, rate, least, TILE, STAGES)
            is_open = (count >= top_k) | ((mass >= top_p * total) & (top_p < 1.0))
    tl.store(tokens + row, token.to(tl.int64), mask=token >= 0)


def sample_rows(
    logits: torch.Tensor,
    maxima: torch.Tensor,
    tokens: torch.Tensor,
    parameters: DrawParameters,
    keys: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """See :func:`sglang_dflash.ops.reference.sample_rows.sample_rows`."""
    num_rows, num_columns = logits.shape
    if num_rows == 0:
        return
    _sample_rows_kernel[(num_rows,)](
        logits=logits,
        row_stride=logits.stride(0),
        num_columns=num_columns,
        rows_per_request=num_rows // parameters.top_ks.shape[0],
        maxima=maxima,
        tokens=tokens,
        temperatures=parameters.temperatures,
        top_ks=parameters.top_ks,
        top_ps=parameters.top_ps,
        min_ps=parameters.min_ps,
        keys=keys,
        positions=positions,
        TILE=_TILE,
        TILES=triton.next_power_of_2(triton.cdiv(num_columns, _TILE)),
        STAGES=_STAGES,
        num_warps=8,
    )
