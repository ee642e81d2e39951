import itertools

import pytest
import torch
from support.drafts import VOCAB, drafts_for, parameters_for

from sglang_dflash.ops.bigrams import LOG_WEIGHT, locate
from sglang_dflash.ops.kernels.fill_pair_table import fill_pair_table
from sglang_dflash.ops.noise import gumbel
from sglang_dflash.ops.reference.fill_pair_table import fill_pair_table as reference
from sglang_dflash.types import PairVectors

BOTH = pytest.mark.parametrize("fill", [fill_pair_table, reference], ids=["kernel", "reference"])
# Of gates: none, one for all candidates of the position before, one for each.
GATES = ("none", "shared", "own")


def arguments(bs, depths, k, device, rank=7, gates="shared", share=0.3, dtype=torch.float32, num_children=None):
    """Return arguments of tables whose pairs matter as much as their logits."""
    candidates, logits, _, parameters, keys, tables, is_chain, seq_lens, slots = drafts_for(
        bs, depths, k, device, share
    )
    before, after = torch.randn(2, VOCAB, rank, device=device).to(dtype).unbind()
    factors = None
    if gates != "none":
        factors = torch.randn(bs, depths, k if gates == "own" else 1, rank, device=device).to(dtype)
        factors = factors.expand(bs, depths, k, rank)
    # Strided, as they are in blocks.
    bonus_tokens = torch.randint(0, VOCAB, (bs, 3), device=device)[:, 1]
    vectors = PairVectors(before, after, factors)
    children = k if num_children is None else num_children
    return [bonus_tokens, candidates, logits, vectors, children, parameters, keys, tables, is_chain, seq_lens, slots]


def scores_of(args, request, depth, before, dtype=torch.float64):
    """Return the scores of all candidates after a candidate of the position before, without noise and text."""
    bonus_tokens, candidates, logits, vectors = args[:4]
    token = candidates[request, depth - 1, before] if depth else bonus_tokens[request]
    left = vectors.before[token].to(dtype)
    if vectors.gates is not None:
        left = left * vectors.gates[request, depth, before].to(dtype)
    return logits[request, depth].to(dtype) + vectors.after[candidates[request, depth]].to(dtype) @ left


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize(
    ("bs", "depths", "k", "rank"),
    [(0, 7, 8, 4), (2, 0, 8, 4), (5, 15, 8, 64), (3, 7, 5, 7), (2, 9, 16, 256), (2, 3, 2, 1)],
)
def test_matches_reference(bs, depths, k, rank, gates, device):
    """Greedy requests, sampled ones with and without temperature 1, and requests of SGLang's sampler."""
    args = arguments(bs, depths, k, device, rank, gates)
    got, want = fill_pair_table(*args), reference(*args)
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-4)
    # Rounding may swap candidates that are as probable as each other.
    assert (got[1] == want[1]).double().mean() > 0.99 if got[1].numel() else True
    assert torch.equal(got[1].sort(dim=-1).values.long(), torch.arange(k, device=device).expand_as(got[1]))


def test_bfloat16(device):
    """Vectors and gates of 16 bits are multiplied in float32."""
    args = arguments(3, 5, 8, device, rank=40, gates="own", dtype=torch.bfloat16)
    torch.testing.assert_close(fill_pair_table(*args)[0], reference(*args)[0], rtol=1e-4, atol=1e-4)


@BOTH
def test_rows_descend_and_sum_to_one(fill, device):
    log_probs, _ = fill(*arguments(9, 7, 6, device))
    assert (log_probs.diff(dim=-1) <= 0).all()
    torch.testing.assert_close(log_probs.exp().sum(dim=-1), torch.ones_like(log_probs[..., 0]))


@BOTH
@pytest.mark.parametrize("gates", GATES)
def test_greedy_conditionals(fill, gates, device):
    """The softmax of logits and products; drafts whose pair is in the text count more, but for the first position."""
    args = arguments(3, 4, 3, device, gates=gates, share=0.4)
    args[5], args[8] = parameters_for(3, device, temperatures=[0, 0, 0]), torch.zeros_like(args[8])
    candidates, tables, slots = args[1], args[7], args[10]
    log_probs, ranks = fill(*args)
    weighted = 0
    for request, depth, before in itertools.product(range(3), range(4), range(3)):
        scores = scores_of(args, request, depth, before)
        if depth:
            found, tags = locate(candidates[request, depth - 1, before], candidates[request, depth])
            is_seen = tables[slots[request], found] == tags
            weighted += int(is_seen.sum())
            scores = scores + LOG_WEIGHT * is_seen
        want, order = scores.log_softmax(dim=0).sort(descending=True)
        assert torch.equal(ranks[request, depth, before].long(), order)
        assert ((log_probs[request, depth, before] - want).abs() < 1e-4).all()
    assert weighted > 0


@BOTH
def test_sampled_conditionals(fill, device):
    """The noise is that of the draft's own position, as the target draws with it, whatever the draft before."""
    args = arguments(2, 3, 4, device, share=0)
    args[5], args[8] = parameters_for(2, device, temperatures=[1.0, 0.7]), torch.zeros_like(args[8])
    log_probs, ranks = fill(*args)
    for request, depth, before in itertools.product(range(2), range(3), range(4)):
        noise = gumbel(args[6][request], args[9][request] + depth, args[1][request, depth])
        scores = scores_of(args, request, depth, before) + [1.0, 0.7][request] * noise
        want, order = scores.log_softmax(dim=0).sort(descending=True)
        assert torch.equal(ranks[request, depth, before].long(), order)
        assert ((log_probs[request, depth, before] - want).abs() < 1e-4).all()


@BOTH
def test_requests_of_sglang_sampler_have_no_noise(fill, device):
    """Theirs is the table of greedy requests."""
    args = arguments(3, 5, 8, device, share=0.4)
    tables = {}
    for temperature, is_chain in ((1.0, 1), (0, 0), (1.0, 0)):
        args[5], args[8] = parameters_for(3, device, [temperature]), torch.full_like(args[8], is_chain)
        tables[temperature, is_chain] = fill(*args)
    assert all(map(torch.equal, tables[1.0, 1], tables[0, 0]))
    assert not torch.equal(tables[1.0, 1][0], tables[1.0, 0][0])


@BOTH
def test_number_of_children(fill, device):
    args = arguments(3, 5, 6, device)
    all_of_them, ranks = fill(*args)
    args[4] = 2
    some, same_ranks = fill(*args)
    assert torch.equal(some[..., :2], all_of_them[..., :2]) and (some[..., 2:] == -torch.inf).all()
    assert torch.equal(ranks, same_ranks)


@BOTH
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_nan_and_infinities(fill, temperature, device):
    """NaN comes last. Numbers beside it keep their order, and every candidate has one place."""
    args = arguments(3, 4, 5, device, share=0)
    args[5] = parameters_for(3, device, temperatures=[temperature] * 3)
    args[2][0, 1, 2:], args[2][1, 2, 1:], args[2][2, 3] = float("nan"), float("-inf"), float("nan")
    log_probs, ranks = fill(*args)
    assert not log_probs.isnan().any()
    assert (log_probs[0, 1, :, 2:] == -torch.inf).all() and (log_probs[0, 1, :, :2] > -torch.inf).all()
    assert (log_probs[1, 2, :, 1:] == -torch.inf).all() and (log_probs[2, 3] == -torch.inf).all()
    assert torch.equal(ranks.sort(dim=-1).values.long(), torch.arange(5, device=device).expand_as(ranks))
