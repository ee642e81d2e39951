"""Conditional log probabilities of drafts, in torch."""

from __future__ import annotations

import math

import torch

from sglang_dflash.ops.bigrams import LOG_WEIGHT, locate
from sglang_dflash.ops.noise import gumbel
from sglang_dflash.ops.reference.weigh_copies import weigh_copies
from sglang_dflash.types import DrawParameters

# Mean of Gumbel noise: what the tokens that are no candidates are expected to gain by theirs.
EULER = 0.5772157


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
    """Return how probable each candidate is after each candidate of the position before, the most probable first.

    A drafter's rows are independent of each other: row d gives the same scores after any draft. Two things are added.

    1. A sampled request's scores are its log probabilities, plus the temperature times the noise that its target's draw
       adds to the same tokens (:mod:`sglang_dflash.ops.noise`). The target's draw is the argmax of the same sum of
       logits. At temperature 0 the scores are a greedy request's. The tokens that are no candidates count as one more,
       with their mass and the noise that is expected of it.
    2. Candidates that the request's text has right after the draft before count `exp(LOG_WEIGHT)` times as much. The
       drafter knows the bonus token, so the first position has none of that.

    Requests of SGLang's sampler (`is_chain`) have no noise, because it draws by other numbers.
    A score that is NaN becomes -inf. Of equal scores the earlier candidate comes first.

    Args:
        candidates: [bs, D, K] int64. Draft tokens of position d, the most probable first.
        logits: [bs, D, K] float32. Their logits.
        log_sums: [bs, D] float32. `logits - log_sums` are log probabilities. None: candidates have all probability,
            which does not change their order.
        parameters: of the bs requests. Temperatures and top_ks are read.
        keys: [bs] int64. Keys of the requests' noise.
        bigram_tables: [slots, TABLE_SIZE] int16; see :mod:`sglang_dflash.ops.bigrams`.
        is_chain: [bs] int64. 1 for requests of SGLang's sampler.
        seq_lens: [bs] int64. Position of the bonus token.
        req_pool_indices: [bs] int64.
        places, lens: of :func:`sglang_dflash.ops.reference.place_copies.place_copies`. None: nothing is copied.

    Returns:
        log_probs: [bs, D, K, K] float32. Entry [i, d, a] belongs to candidate a of position d - 1, and descends.
            At d = 0 all rows are the same.
        ranks: [bs, D, K, K] uint8. Which candidate each of them is.
    """
    bs, depths, k = candidates.shape
    logits = torch.where(logits.isnan(), -torch.inf, logits)
    plain = logits.log_softmax(dim=-1) if log_sums is None else logits - log_sums[:, :, None]
    is_sampled = ((parameters.top_ks > 1) & (is_chain == 0))[:, None]
    temperatures = parameters.temperatures[:, None]
    positions = seq_lens[:, None] + torch.arange(depths, device=seq_lens.device)
    noise = gumbel(keys[:, None, None], positions[:, :, None], candidates)
    scores = torch.where(is_sampled[:, :, None], plain + temperatures[:, :, None] * noise, plain)
    rest = (1 - plain.exp().sum(dim=-1)).clamp(min=0).log() + temperatures * EULER
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    rest = torch.where(rest.isnan(), -torch.inf, rest)

    after = scores[:, :, None, :].expand(bs, depths, k, k)
    slots, tags = locate(candidates[:, :-1, :, None], candidates[:, 1:, None, :])
    is_seen = torch.zeros(after.shape, dtype=torch.bool, device=after.device)
    is_seen[:, 1:] = bigram_tables[req_pool_indices[:, None, None, None], slots] == tags
    # A greedy request's other tokens keep the mass that the drafter gives them.
    mass = torch.where(is_seen, plain[:, :, None, :].exp(), 0.0).sum(dim=-1)
    after = after + torch.where(is_seen, LOG_WEIGHT, 0.0)
    greedy_sum = (1 + math.expm1(LOG_WEIGHT) * mass).log()
    sampled_sum = torch.cat((after, rest[:, :, None, None].expand(bs, depths, k, 1)), dim=-1).logsumexp(dim=-1)
    after = after - torch.where(is_sampled[:, :, None], sampled_sum, greedy_sum)[..., None]
    after = torch.where(after.isnan(), -torch.inf, after)
    log_probs, ranks = after.sort(dim=-1, descending=True, stable=True)
    ranks = ranks.to(torch.uint8)
    if places is not None:
        weigh_copies(log_probs, ranks, places, lens)
    return log_probs, ranks
