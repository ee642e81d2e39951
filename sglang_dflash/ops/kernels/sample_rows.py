"""The target's tokens of sampled requests, drawn without sorting a vocabulary, in one launch.

A draw is the argmax of logit / T + noise over the allowed tokens (the Gumbel-max trick, see
:mod:`sglang_dflash.ops.noise`). A row first takes it over all that min_p leaves. It then asks whether top_k and top_p
allow the token, which takes the number and the mass of the tokens that are likelier. If they do not, none as likely or
less is allowed either, and the row draws again among the likelier ones. The last draw is the argmax over the allowed
tokens: each set of this search contains them, and its argmax is one of them.
Source of the search: https://flashinfer.ai/2025/03/10/sampling.html, with one pivot instead of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.kernels.gumbel import gumbel, hash_prefix
from sglang_dflash.types import DrawParameters

# Columns that a row's threads read together; lane i of a row reads columns i, i + _TILE, i + 2 * _TILE and so on.
_TILE = 4096
# Tiles in flight.
_STAGES = 2


@triton.jit
def _draw(logits, num_columns, rate, prefix, least, below, TILE: tl.constexpr, STAGES: tl.constexpr):
    """Return the column of the largest logit * rate + noise, among logits of at least `least` and above `below`; the
    first of equals, -1 where there is none."""
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_column = tl.full((TILE,), -1, tl.int32)
    # Nothing is reduced across lanes here: the threads would wait for each other in every tile.
    for start in tl.range(0, num_columns, TILE, num_stages=STAGES):
        column = start + tl.arange(0, TILE)
        value = tl.load(logits + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
        score = value * rate + gumbel(prefix, column)
        is_better = (value >= least) & (value > below) & (score > best)
        best = tl.where(is_better, score, best)
        best_column = tl.where(is_better, column, best_column)
    drawn = tl.min(tl.where((best == tl.max(best)) & (best_column >= 0), best_column, 2147483647))
    return tl.where(drawn == 2147483647, -1, drawn)


@triton.jit
def _weigh(logits, num_columns, maximum, rate, least, below, TILE: tl.constexpr, STAGES: tl.constexpr):
    """Return, of the weights exp((logit - maximum) * rate), the mass of logits of at least `least` and above `below`,
    the mass of the row, and how many the former are."""
    mass, total = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    count = tl.zeros((TILE,), tl.int32)
    for start in tl.range(0, num_columns, TILE, num_stages=STAGES):
        column = start + tl.arange(0, TILE)
        value = tl.load(logits + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
        weight = tl.where(value > float("-inf"), tl.exp((value - maximum) * rate), 0.0)
        is_likelier = (value >= least) & (value > below)
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
    below = tl.full((), float("-inf"), tl.float32)
    row_logits = logits + row * row_stride
    token = tl.full((), -1, tl.int32)
    is_filtered = (top_k < num_columns) | (top_p < 1.0)
    is_open = top_k > 1
    # Ends: `below` rises to a larger logit every time, and the largest has nothing above it to be rejected for.
    while is_open:
        token = _draw(row_logits, num_columns, rate, prefix, least, below, TILE, STAGES)
        is_open = is_filtered & (token >= 0)
        if is_open:
            below = tl.load(row_logits + token).to(tl.float32)
            mass, total, count = _weigh(row_logits, num_columns, maximum, rate, least, below, TILE, STAGES)
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
        STAGES=_STAGES,
        num_warps=8,
    )
