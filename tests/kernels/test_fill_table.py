import itertools
import math

import pytest
import torch
from support.drafts import drafts_for, parameters_for

from sglang_dflash.ops.bigrams import LOG_WEIGHT, locate
from sglang_dflash.ops.kernels.fill_table import fill_table
from sglang_dflash.ops.noise import gumbel
from sglang_dflash.ops.reference.fill_table import fill_table as reference

BOTH = pytest.mark.parametrize("fill", [fill_table, reference], ids=["kernel", "reference"])


@pytest.mark.parametrize(
    ("bs", "depths", "k"), [(0, 15, 8), (2, 0, 8), (5, 15, 8), (3, 7, 5), (2, 63, 16), (4, 1, 1), (33, 3, 2)]
)
def test_matches_reference(bs, depths, k, device):
    """Greedy requests, sampled ones with and without temperature 1, and requests of SGLang's sampler."""
    args = drafts_for(bs, depths, k, device)
    got, want = fill_table(*args), reference(*args)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    # Rounding may swap candidates that are as probable as each other.
    assert (got[1] == want[1]).double().mean() > 0.99 if got[1].numel() else True
    assert torch.equal(got[1].sort(dim=-1).values.long(), torch.arange(k, device=device).expand_as(got[1]))


@pytest.mark.parametrize(("bs", "depths", "k"), [(0, 15, 16), (5, 15, 8), (3, 7, 5), (2, 63, 16), (4, 1, 1)])
def test_without_sums_matches_reference(bs, depths, k, device):
    args = list(drafts_for(bs, depths, k, device))
    args[2] = None
    got, want = fill_table(*args), reference(*args)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    assert (got[1] == want[1]).double().mean() > 0.99 if got[1].numel() else True


@BOTH
def test_order_does_not_need_sums(fill, device):
    """Chains follow the order. A candidate that is impossible to the drafter, or no number, does not change it."""
    args = list(drafts_for(9, 7, 6, device))
    args[1][1, 2, 4:] = float("-inf")
    args[1][2, 3, 3:] = float("nan")
    _, want = fill(*args)
    args[2] = None
    log_probs, ranks = fill(*args)
    assert torch.equal(ranks, want)
    # Candidates have all probability. A sampled request's noise counts, too.
    torch.testing.assert_close(log_probs.exp().sum(dim=-1), torch.ones_like(log_probs[..., 0]))


@BOTH
def test_rows_descend_and_sum_to_one_at_most(fill, device):
    log_probs, _ = fill(*drafts_for(9, 7, 6, device))
    assert (log_probs.diff(dim=-1) <= 0).all()
    assert (log_probs.exp().sum(dim=-1) < 1 + 1e-5).all()


@BOTH
def test_greedy_conditionals(fill, device):
    """The drafter's, weighted by the request's text after drafts, not after the bonus token."""
    args = drafts_for(3, 4, 3, device, share=0.4)
    candidates, logits, log_sums, _, _, tables, _, _, slots = args
    log_probs, ranks = fill(*args[:3], parameters_for(3, device, temperatures=[0, 0, 0]), *args[4:])
    plain = (logits - log_sums[:, :, None]).double()
    weighted = 0
    for request, depth, before, place in itertools.product(range(3), range(4), range(3), range(3)):
        weights = torch.zeros(3, dtype=torch.float64, device=device)
        if depth:
            found, tags = locate(candidates[request, depth - 1, before], candidates[request, depth])
            weights += LOG_WEIGHT * (tables[slots[request], found] == tags)
        weighted += int((weights > 0).sum())
        added = (plain[request, depth].exp() * weights.expm1()).sum()
        rank = ranks[request, depth, before, place].long()
        want = plain[request, depth, rank] + weights[rank] - (1 + added).log()
        assert abs(log_probs[request, depth, before, place] - want) < 1e-5
    assert weighted > 0


@BOTH
def test_sampled_conditionals(fill, device):
    """Log probabilities with temperature times the noise of their positions. The rest is one more candidate."""
    args = drafts_for(2, 3, 4, device, share=0)
    candidates, logits, log_sums, _, keys, _, _, seq_lens, _ = args
    parameters = parameters_for(2, device, temperatures=[1.0, 0.7])
    log_probs, ranks = fill(*args[:3], parameters, *args[4:])
    plain = (logits - log_sums[:, :, None]).double()
    for request, depth in itertools.product(range(2), range(3)):
        temperature = [1.0, 0.7][request]
        position = seq_lens[request] + depth
        scores = plain[request, depth] + temperature * gumbel(keys[request], position, candidates[request, depth])
        rest = math.log(1 - plain[request, depth].exp().sum()) + temperature * 0.5772157
        whole = torch.cat((scores, torch.tensor([rest], device=device))).logsumexp(dim=0)
        want, order = (scores - whole).sort(descending=True)
        assert (ranks[request, depth].long() == order).all()
        assert ((log_probs[request, depth] - want).abs() < 1e-5).all()


@BOTH
def test_requests_of_sglang_sampler_have_no_noise(fill, device):
    """Theirs is the table of greedy requests."""
    args = drafts_for(3, 5, 8, device, share=0.4)
    sampled, greedy = (parameters_for(3, device, temperatures=[temperature]) for temperature in (1.0, 0))
    log_probs, ranks = fill(*args[:3], sampled, *args[4:6], torch.ones_like(args[6]), *args[7:])
    want, want_ranks = fill(*args[:3], greedy, *args[4:6], torch.zeros_like(args[6]), *args[7:])
    assert torch.equal(log_probs, want) and torch.equal(ranks, want_ranks)
    assert not torch.equal(log_probs, fill(*args[:3], sampled, *args[4:6], torch.zeros_like(args[6]), *args[7:])[0])


@BOTH
@pytest.mark.parametrize("temperature", [0, 1.0, 0.5])
def test_nan_and_infinities(fill, temperature, device):
    """NaN comes last. Numbers beside it keep their order, and every candidate has one place."""
    args = list(drafts_for(3, 4, 5, device, share=0))
    args[3] = parameters_for(3, device, temperatures=[temperature] * 3)
    args[1][0, 1, 2:], args[1][1, 2, 1:], args[2][2, 3] = float("nan"), float("-inf"), float("nan")
    log_probs, ranks = fill(*args)
    assert not log_probs.isnan().any()
    assert (log_probs[0, 1, :, 2:] == -torch.inf).all() and (log_probs[0, 1, :, :2] > -torch.inf).all()
    assert (log_probs[1, 2, :, 1:] == -torch.inf).all() and (log_probs[2, 3] == -torch.inf).all()
    assert torch.equal(ranks.sort(dim=-1).values.long(), torch.arange(5, device=device).expand_as(ranks))
