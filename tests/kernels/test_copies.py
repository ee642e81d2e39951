"""Copies of requests' own texts: the kernels against their references, and both against a search in plain Python."""

import pytest
import torch
from support.drafts import VOCAB, drafts_for

from sglang_dflash.ops.copies import LOOKUP, MAX_MATCH, MAX_WEIGHT, MIN_MATCH, NO_TOKEN, TEXT_SIZE, weights
from sglang_dflash.ops.kernels.fill_pair_table import fill_pair_table
from sglang_dflash.ops.kernels.fill_table import fill_table
from sglang_dflash.ops.kernels.place_copies import place_copies
from sglang_dflash.ops.kernels.write_texts import write_texts
from sglang_dflash.ops.reference.fill_pair_table import fill_pair_table as pair_reference
from sglang_dflash.ops.reference.fill_table import fill_table as fill_reference
from sglang_dflash.ops.reference.place_copies import place_copies as place_reference
from sglang_dflash.ops.reference.write_texts import write_texts as write_reference
from sglang_dflash.types import PairVectors


@pytest.mark.parametrize(("bs", "width", "size"), [(0, 16, 64), (1, 1, 64), (5, 7, 16), (33, 16, 16), (3, 1500, 2048)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_texts_are_written_as_in_the_reference(bs, width, size, dtype, device):
    """Texts longer than the ring continue at its beginning."""
    args = (
        torch.randperm(bs + 3, device=device)[:bs],
        torch.randint(0, 4 * size, (bs,), device=device),
        # Rows of a larger tensor.
        torch.randint(0, 2**31 - 1, (bs, width + 2), device=device).to(dtype)[:, 1 : 1 + width],
        torch.randint(0, width + 1, (bs,), device=device),
        torch.arange(bs, device=device) % 3 // 2,
    )
    before = torch.randint(-(2**31), -1, (bs + 3, size), dtype=torch.int32, device=device)
    got, want = before.clone(), before.clone()
    write_texts(got, *args)
    write_reference(want, *args)
    assert torch.equal(got, want)
    lens = torch.where(args[-1] == 0, args[-2], 0)
    assert int((got != before).sum()) == int(lens.sum())


def search(text: list[int], size: int, depths: int) -> tuple[list[int], int]:
    """Return the copy after the end of a text, and the length of its match, by trying all places."""
    kept = text[-size:]
    best, start = 0, None
    for end in range(len(kept) - 1, 0, -1):
        n = 0
        while n < end and kept[end - 1 - n] == kept[-1 - n]:
            n += 1
        if min(n, LOOKUP) > min(best, LOOKUP):
            best, start = n, end
    if best < MIN_MATCH:
        return [], 0
    copy = []
    for depth in range(depths):
        token = kept[start + depth % (len(kept) - start)]
        if token == NO_TOKEN:
            break
        copy.append(token)
    return copy, min(best, MAX_MATCH)


def rings_of(texts: list[list[int]], size: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the rings of texts in random slots, the slots, and the positions of the last tokens.

    Other places, and other slots, hold the texts of requests that have left.
    """
    slots = torch.randperm(len(texts) + 3)[: len(texts)]
    rings = torch.randint(0, 3, (len(texts) + 3, size), dtype=torch.int32)
    for slot, text in zip(slots.tolist(), texts, strict=True):
        for position in range(max(0, len(text) - size), len(text)):
            rings[slot, position % size] = text[position]
    return rings.to(device), slots.to(device), torch.tensor([len(text) - 1 for text in texts], device=device)


def texts_of(lens: list[int], vocab: int) -> list[list[int]]:
    """Return random texts of few different tokens, each with a part that occurs twice and a token of an image."""
    texts = [torch.randint(0, vocab, (length,)).tolist() for length in lens]
    for i, text in enumerate(texts):
        if len(text) > 40:
            text[-20 - i :] = text[3 : 23 + i]
            text[5 + i] = NO_TOKEN
    return texts


@pytest.mark.parametrize(
    ("lens", "size", "vocab"),
    [
        ([1, 2, 3, 4, 5, 6, 7], 16, 2),
        ([15, 16, 17, 33, 100], 16, 3),
        ([64] * 5, 128, 500),
        ([2000, 2048, 2049, 5000, 1], 2048, 500),
        ([3000, 1025, 700], 4096, 5),
        # A lane has several places of the longest text.
        ([16000, 20000, 9000], TEXT_SIZE, 500),
    ],
)
@pytest.mark.parametrize(("depths", "k"), [(15, 16), (1, 2), (6, 5)])
def test_copies_are_found_as_by_trying_all_places(lens, size, vocab, depths, k, device):
    texts = texts_of(lens, vocab)
    rings, slots, seq_lens = rings_of(texts, size, device)
    is_chain = (torch.arange(len(lens), device=device) == 1).long()
    candidates = torch.rand(len(lens), depths, 1000, device=device).argsort(dim=-1)[..., :k].contiguous()
    # Some copied tokens are candidates already.
    steps = torch.arange(0, depths, 2, device=device)
    candidates[:, ::2, 0] = rings[slots[:, None], (seq_lens[:, None] - 3 - steps) % size].long()
    logits = torch.randn(candidates.shape, device=device)
    results = []
    for place in (place_copies, place_reference):
        changed = candidates.clone(), logits.clone()
        results.append((*changed, *place(rings, slots, seq_lens, is_chain, *changed)))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
    of_trees, of_logits, places, match_lens = (tensor.cpu() for tensor in results[0])
    num_copies = 0
    for i, text in enumerate(texts):
        copy, length = ([], 0) if is_chain[i] else search(text, size, depths)
        assert int(match_lens[i]) == length, i
        assert (places[i, len(copy) :] == -1).all()
        for depth, token in enumerate(copy):
            own = candidates[i, depth].tolist()
            place = own.index(token) if token in own else k - 1
            assert places[i, depth] == place and of_trees[i, depth, place] == token
            assert token in own or of_logits[i, depth, place] == -torch.inf
            num_copies += 1
    assert num_copies > 0


@pytest.mark.parametrize("place", [place_copies, place_reference])
def test_another_request_of_the_slot_is_not_seen(place, device):
    """A short text in the ring of a long one finds nothing that it does not have itself."""
    size = 32
    ring = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8] * 4], dtype=torch.int32, device=device)
    zeros = torch.zeros(1, dtype=torch.int64, device=device)
    for length in range(1, 9):
        candidates = torch.full((1, 3, 2), 9, device=device)
        places, lens = place(ring, zeros, zeros + length - 1, zeros, candidates, candidates.float())
        assert (places == -1).all() and int(lens) == 0, length
    places, lens = place(ring, zeros, zeros + size - 1, zeros, candidates, candidates.float())
    assert (places == 1).all() and candidates[0, :, 1].tolist() == [1, 2, 3]


def copies_for(bs: int, depths: int, k: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return places and lengths of random copies, of which some end early and some are missing."""
    num_copied = torch.randint(0, depths + 1, (bs, 1), device=device)
    places = torch.randint(0, k, (bs, depths), dtype=torch.int32, device=device)
    places = places.where(torch.arange(depths, device=device) < num_copied, -1)
    return places, torch.randint(MIN_MATCH, MAX_MATCH, (bs,), dtype=torch.int32, device=device)


@pytest.mark.parametrize(("bs", "depths", "k"), [(0, 15, 16), (7, 15, 16), (5, 1, 2), (9, 6, 5), (33, 3, 8)])
def test_rows_are_weighed_as_in_the_reference(bs, depths, k, device):
    drafts = drafts_for(bs, depths, k, device)
    # A copy's token that the drafter did not have.
    drafts[1][..., -1] = -torch.inf
    places, lens = copies_for(bs, depths, k, device)
    got, want = fill_table(*drafts, places, lens), fill_reference(*drafts, places, lens)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    # Rounding may swap candidates that are as probable as each other.
    assert (got[1] == want[1]).double().mean() > 0.99 if bs else True
    assert torch.equal(got[1].sort(dim=-1).values.long(), torch.arange(k, device=device).expand_as(got[1]))
    if bs == 0:
        return
    log_probs, ranks = fill_reference(*drafts)
    assert not torch.equal(want[1], ranks)
    assert (got[0].diff(dim=-1).nan_to_num(0) <= 0).all()
    torch.testing.assert_close(weights(lens, depths).clamp(max=MAX_WEIGHT), weights(lens, depths))
    for i in range(bs):
        for depth in range(depths):
            before = 0 if depth == 0 else int(places[i, depth - 1])
            place = int(places[i, depth])
            for row in range(k):
                probs, old = torch.zeros(k), torch.zeros(k)
                probs[got[1][i, depth, row].long().cpu()] = got[0][i, depth, row].exp().cpu()
                old[ranks[i, depth, row].long().cpu()] = log_probs[i, depth, row].exp().cpu()
                if place >= 0 and (depth == 0 or row == before):
                    matching = int(lens[i]) + depth
                    weight = min(0.95, matching / (matching + 4))
                    old = (1 - weight) * old
                    old[place] += weight
                torch.testing.assert_close(probs, old, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_children", [2, 16])
def test_tables_of_pairs_are_weighed_as_in_the_reference(num_children, device):
    """A copy's token that no tree would take is taken. Trees take no other of these."""
    bs, depths, k = 5, 7, 16
    drafts = drafts_for(bs, depths, k, device)
    vectors = PairVectors(*torch.randn(2, VOCAB, 8, device=device).unbind(), None)
    bonus_tokens = torch.randint(0, VOCAB, (bs,), device=device)
    args = (bonus_tokens, *drafts[:2], vectors, num_children, *drafts[3:], *copies_for(bs, depths, k, device))
    got, want = fill_pair_table(*args), pair_reference(*args)
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-4)
    is_possible = want[0] > -torch.inf
    assert (got[1] == want[1])[is_possible].double().mean() > 0.99
    num_possible = is_possible.sum(dim=-1)
    assert (num_possible >= num_children).all() and (num_possible > num_children).any() == (num_children < k)
