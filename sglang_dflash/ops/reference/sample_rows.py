"""The target's tokens of sampled requests, in torch."""

from __future__ import annotations

import torch

from sglang_dflash.ops.noise import gumbel
from sglang_dflash.types import DrawParameters


def sample_rows(
    logits: torch.Tensor,
    maxima: torch.Tensor,
    tokens: torch.Tensor,
    parameters: DrawParameters,
    keys: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Replace the argmax of sampled requests by a draw from :func:`allowed_distribution`.

    The draw is the argmax of logit / T + noise over the allowed tokens, the first of equals. It is a function of the
    request's key, the position and the logits alone: see :mod:`sglang_dflash.ops.noise`.

    Args:
        logits: [bs * R, V] floating-point, R rows for each request. Rows may be strided, columns not. NaN and -inf are
            never drawn.
        maxima, tokens: [bs * R], and [bs * R] int64, overwritten: what `row_max` returns. A row whose maximum is
            infinite keeps its token.
        parameters: of the bs requests.
        keys: [bs] int64. Keys of the requests' noise.
        positions: [bs * R] int64. Position of the token after which each row draws.
    """
    if not len(tokens):
        return
    rows_per_request = len(tokens) // len(parameters.top_ks)
    is_sampled = (parameters.top_ks > 1).repeat_interleave(rows_per_request) & maxima.isfinite()
    if not is_sampled.any():
        return
    is_allowed = allowed_distribution(logits, parameters)[is_sampled] > 0
    rates = (1 / parameters.temperatures).repeat_interleave(rows_per_request)[is_sampled, None]
    row_keys = keys.repeat_interleave(rows_per_request)[is_sampled, None]
    columns = torch.arange(logits.shape[1], device=logits.device)
    scores = logits[is_sampled].to(torch.float32) * rates + gumbel(row_keys, positions[is_sampled, None], columns)
    tokens[is_sampled] = scores.where(is_allowed, -torch.inf).argmax(dim=-1)


def allowed_distribution(logits: torch.Tensor, parameters: DrawParameters) -> torch.Tensor:
    """softmax(logits / temperature) restricted to the tokens that the filters of their request allow.

    Allowed are those of which (1) fewer than top_k tokens are likelier, (2) those likelier have less than top_p of the
    whole mass, and (3) the probability is at least min_p of the likeliest token's. So equally likely tokens are allowed
    together. Source: `TopKTopPSamplingFromProbKernel` (the joint order of top_k and top_p) and
    `MinPSamplingFromProbKernel` in flashinfer/sampling.cuh, which SGLang's `Sampler` calls.

    Args:
        logits: [P * B, V], with a finite maximum in every row of a sampled request.
        parameters: of the P requests.

    Returns:
        [P * B, V] float64, rows of sum 1; 0 where a token is not allowed.
    """
    block_size = len(logits) // len(parameters.top_ks)

    def per_row(values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.float64).repeat_interleave(block_size)[:, None]

    values = logits.to(torch.float64).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    probs = (values / per_row(parameters.temperatures)).softmax(dim=-1)
    # Logits are compared, not probabilities, which may round to the same.
    ordered, order = values.sort(dim=-1, descending=True)
    ordered_probs = probs.gather(1, order)
    rank = torch.arange(values.shape[1], device=values.device).expand_as(values)
    is_first_of_equals = torch.ones_like(ordered, dtype=torch.bool)
    is_first_of_equals[:, 1:] = ordered[:, 1:] < ordered[:, :-1]
    num_likelier = rank.where(is_first_of_equals, 0).cummax(dim=-1).values
    likelier_mass = (ordered_probs.cumsum(dim=-1) - ordered_probs).gather(1, num_likelier)
    threshold = ordered[:, :1] + per_row(parameters.temperatures) * per_row(parameters.min_ps).log()
    is_allowed = (num_likelier < per_row(parameters.top_ks)) & (ordered >= threshold) & (ordered > -torch.inf)
    is_allowed &= (likelier_mass < per_row(parameters.top_ps)) | (per_row(parameters.top_ps) >= 1)
    kept = torch.zeros_like(probs).scatter(1, order, ordered_probs.where(is_allowed, 0))
    return kept / kept.sum(dim=-1, keepdim=True)
