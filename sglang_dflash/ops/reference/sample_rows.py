"""Sampling of the target's tokens, in torch."""

from __future__ import annotations

import torch

from sglang_dflash.types import DrawParameters


def sample_rows(
    logits: torch.Tensor, maxima: torch.Tensor, tokens: torch.Tensor, parameters: DrawParameters, seed: torch.Tensor
) -> None:
    """Replace the argmax of sampled requests by a sample of :func:`allowed_distribution`, independent for each row.

    The samples are a function of the arguments alone. They differ between this reference and the kernel.

    Args:
        logits: [bs * W, V] floating-point. Rows may be strided, columns not. NaN and -inf are never sampled.
        maxima: [bs * W] as `row_max` returns. A row whose maximum is infinite keeps its token.
        tokens: [bs * W] int64 as `row_max` returns, overwritten.
        parameters: of the bs requests.
        seed: [1] int64.
    """
    if not len(tokens):
        return
    block_size = len(tokens) // len(parameters.top_ks)
    is_sampled = (parameters.top_ks > 1).repeat_interleave(block_size) & maxima.isfinite()
    if not is_sampled.any():
        return
    generator = torch.Generator(logits.device).manual_seed(int(seed))
    probs = allowed_distribution(logits, parameters)[is_sampled]
    tokens[is_sampled] = torch.multinomial(probs, 1, generator=generator).squeeze(1)


def allowed_distribution(logits: torch.Tensor, parameters: DrawParameters) -> torch.Tensor:
    """Return softmax(logits / temperature), restricted to the tokens that the request's filters allow.

    A token is allowed if:

    1. fewer than top_k tokens are more likely,
    2. the more likely tokens have less than top_p of the whole mass, and
    3. its probability is at least min_p times that of the most likely token.

    So equally likely tokens are allowed together. Source: `TopKTopPSamplingFromProbKernel` (the joint order of top_k
    and top_p) and `MinPSamplingFromProbKernel` in flashinfer/sampling.cuh, which SGLang's `Sampler` calls.

    Args:
        logits: [bs * W, V]. Every row of a sampled request has a finite maximum.
        parameters: of the bs requests.

    Returns:
        [bs * W, V] float64. Rows sum to 1; tokens that are not allowed have 0.
    """
    block_size = len(logits) // len(parameters.top_ks)

    def per_row(values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.float64).repeat_interleave(block_size)[:, None]

    values = logits.to(torch.float64).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    probs = (values / per_row(parameters.temperatures)).softmax(dim=-1)
    # Logits are compared because different logits can round to equal probabilities.
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
