"""Copies of the request's own text as candidates, in torch."""

from __future__ import annotations

import torch

from sglang_dflash.ops.copies import LOOKUP, MAX_MATCH, MIN_MATCH


def place_copies(
    texts: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    is_chain: torch.Tensor,
    candidates: torch.Tensor,
    logits: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find what followed the end of each text before, and make these tokens candidates.

    A match of length n ends at an earlier token: n tokens up to there are the last n of the text. Matches of fewer than
    MIN_MATCH tokens do not count. The longest match is taken, up to LOOKUP tokens, and of equals the most recent. Its
    copy is what follows: after the text's end it begins again, so that a text in a loop stays in it. A token
    that is none of the vocabulary ends the copy.

    A token of the copy that is no candidate at its position takes the place of the last candidate, with logit -inf. The
    drafter has not said how probable it is.

    Args:
        texts: [request slots, S] int32, S a power of two; see `write_texts`. Negative tokens are none of the
            vocabulary.
        req_pool_indices: [bs] int64.
        seq_lens: [bs] int64. Position of the bonus token, the last of the text.
        is_chain: [bs] int64. 1 for requests of SGLang's sampler, which have no copy.
        candidates: [bs, D, K] int64, contiguous; changed. Draft tokens of position d, the most probable first.
        logits: [bs, D, K] float32, contiguous; changed.

    Returns:
        places: [bs, D] int32. Which candidate the copy's token is; -1 where there is none.
        lens: [bs] int32. Length of the match, at most MAX_MATCH; 0: there is none.
    """
    # As on a GPU.
    assert candidates.is_contiguous() and logits.is_contiguous()
    depths, k = candidates.shape[1:]
    size, device = texts.shape[1], texts.device
    # The text in reverse: [bs, S], the bonus token first.
    back = torch.arange(size, device=device)
    newest = texts[req_pool_indices[:, None], (seq_lens[:, None] - back) % size]
    newest = torch.where(back <= seq_lens[:, None], newest, torch.iinfo(torch.int32).min)
    # [bs, S]: tokens that match before each place; 0 at the text's end itself.
    num_same = torch.zeros_like(newest)
    is_same = back > 0
    for i in range(min(LOOKUP, size)):
        earlier = torch.full_like(newest, torch.iinfo(torch.int32).min)
        earlier[:, : size - i] = newest[:, i:]
        is_same = is_same & (earlier == newest[:, i : i + 1]) & (back + i <= seq_lens[:, None])
        num_same += is_same
    # The first of equals is the most recent.
    place = num_same.argmax(dim=1, keepdim=True)
    is_found = (num_same.gather(1, place) >= MIN_MATCH) & (is_chain == 0)[:, None]
    counted = torch.arange(min(MAX_MATCH, size), device=device)
    earlier = newest.gather(1, (place + counted).clamp(max=size - 1))
    is_match = (earlier == newest[:, : len(counted)]) & (place + counted <= seq_lens[:, None].clamp(max=size - 1))
    lens = torch.where(is_found, is_match.to(torch.int32).cumprod(dim=1).sum(dim=1, keepdim=True), 0)

    depth = torch.arange(depths, device=device)
    copies = newest.gather(1, (place - 1 - depth % place.clamp(min=1)).clamp(min=0)).to(torch.int64)
    has_copy = ((copies >= 0) & is_found).to(torch.int32).cumprod(dim=1) == 1
    is_candidate = candidates == copies[:, :, None]
    is_new = has_copy & ~is_candidate.any(dim=-1)
    places = torch.where(is_new, k - 1, is_candidate.to(torch.int32).argmax(dim=-1))
    candidates[..., -1] = torch.where(is_new, copies, candidates[..., -1])
    logits[..., -1] = torch.where(is_new, -torch.inf, logits[..., -1])
    return torch.where(has_copy, places, -1).to(torch.int32), lens[:, 0].to(torch.int32)
