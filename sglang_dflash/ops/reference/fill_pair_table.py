"""Conditional log probabilities of drafts whose drafter scores pairs of them, in torch."""

from __future__ import annotations

import torch

from sglang_dflash.ops.bigrams import LOG_WEIGHT, locate
from sglang_dflash.ops.noise import gumbel
from sglang_dflash.ops.reference.weigh_copies import weigh_copies
from sglang_dflash.types import DrawParameters, PairVectors


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
    """Return how probable each candidate is after each candidate of the position before, the most probable first.

    The score of candidate b after token a is the logit of b, plus the product of two vectors, of a and of b. As in
    :func:`sglang_dflash.ops.reference.fill_table.fill_table`, a sampled request's scores have its noise added, times
    the temperature, and pairs that are in the request's text count `exp(LOG_WEIGHT)` times as much, except after the
    bonus token. Requests of SGLang's sampler (`is_chain`) have no noise.

    The candidates have all of the probability, because the drafter has learned to choose among them. A score that is
    NaN becomes -inf. Of equal scores the earlier candidate comes first.

    Args:
        bonus_tokens: [bs] int64; may be strided. The tokens before the first position.
        candidates: [bs, D, K] int64. Draft tokens of position d; 2 <= K <= 16.
        logits: [bs, D, K] float32. Their logits.
        vectors: of tokens.
        num_children: candidates of a row of the table that a tree may take. The others have log probability -inf.
        parameters: of the bs requests. Temperatures and top_ks are read.
        keys: [bs] int64. Keys of the requests' noise.
        bigram_tables: [slots, TABLE_SIZE] int16; see :mod:`sglang_dflash.ops.bigrams`.
        is_chain: [bs] int64. 1 for requests of SGLang's sampler.
        seq_lens: [bs] int64. Position of the bonus token.
        req_pool_indices: [bs] int64.
        places, lens: of :func:`sglang_dflash.ops.reference.place_copies.place_copies`. None: nothing is copied.

    Returns:
        log_probs: [bs, D, K, K] float32. Entry [i, d, a] belongs to candidate a of position d - 1, and descends.
            At d = 0 all rows are those of the bonus token.
        ranks: [bs, D, K, K] uint8. Which candidate each of them is.
    """
    bs, depths, k = candidates.shape
    # [bs, D, K]: the tokens that rows of the table belong to.
    before = torch.cat((bonus_tokens[:, None, None].expand(bs, 1, k), candidates), dim=1)[:, :depths]
    left = vectors.before[before].float()
    if vectors.gates is not None:
        left = left * vectors.gates.float()
    scores = logits[:, :, None, :] + left @ vectors.after[candidates].float().transpose(-1, -2)
    is_sampled = ((parameters.top_ks > 1) & (is_chain == 0))[:, None, None]
    positions = seq_lens[:, None] + torch.arange(depths, device=seq_lens.device)
    noise = parameters.temperatures[:, None, None] * gumbel(keys[:, None, None], positions[:, :, None], candidates)
    scores = scores + torch.where(is_sampled, noise, 0.0)[:, :, None, :]
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    slots, tags = locate(candidates[:, :-1, :, None], candidates[:, 1:, None, :])
    is_seen = bigram_tables[req_pool_indices[:, None, None, None], slots] == tags
    scores[:, 1:] += torch.where(is_seen, LOG_WEIGHT, 0.0)
    log_probs = scores - scores.logsumexp(dim=-1, keepdim=True)
    log_probs = torch.where(log_probs.isnan(), -torch.inf, log_probs)
    log_probs, ranks = log_probs.sort(dim=-1, descending=True, stable=True)
    log_probs[..., num_children:] = -torch.inf
    ranks = ranks.to(torch.uint8)
    if places is not None:
        weigh_copies(log_probs, ranks, places, lens)
    return log_probs, ranks
