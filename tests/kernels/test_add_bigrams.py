import pytest
import torch

from sglang_dflash.ops.bigrams import TABLE_SIZE, locate, tables_of
from sglang_dflash.ops.kernels.add_bigrams import add_bigrams
from sglang_dflash.ops.kernels.begin_bigrams import begin_bigrams
from sglang_dflash.ops.reference.add_bigrams import add_bigrams as reference
from sglang_dflash.ops.reference.begin_bigrams import begin_bigrams as begin_reference


@pytest.mark.parametrize(("bs", "width"), [(0, 16), (1, 1), (5, 7), (33, 16), (3, 64)])
@pytest.mark.parametrize("vocab", [3, 151936, 2**40])
def test_matches_reference(bs, width, vocab, device):
    """Texts of few tokens repeat the same pairs. Images have tokens beyond any vocabulary."""
    args = (
        torch.randperm(bs + 3, device=device)[:bs],
        # A column of a larger tensor, as the tokens of trees are.
        torch.randint(0, vocab, (bs, 3), device=device)[:, 0],
        torch.randint(0, vocab, (bs, width), device=device),
        torch.randint(1, width + 1, (bs,), device=device),
        torch.arange(bs, device=device) % 3 // 2,
    )
    before = torch.randint(-(2**15), 2**15, (bs + 3, TABLE_SIZE), dtype=torch.int16, device=device)
    got, want = before.clone(), before.clone()
    add_bigrams(got, *args)
    reference(want, *args)
    assert torch.equal(got, want)
    assert bs == 0 or not torch.equal(got, before)


@pytest.mark.parametrize(("bs", "width", "size"), [(0, 16, 64), (1, 1, 64), (5, 7, 16), (33, 16, 16)])
def test_texts_are_written_too(bs, width, size, device):
    """Tokens follow the one before the cycle. Texts longer than the ring continue at its beginning."""
    args = [
        torch.randperm(bs + 3, device=device)[:bs],
        *torch.randint(0, 2**31 - 1, (bs, width + 1), device=device).split((1, width), dim=1),
        torch.randint(0, width + 1, (bs,), device=device),
        torch.arange(bs, device=device) % 3 // 2,
    ]
    args[1] = args[1][:, 0]
    seq_lens = torch.randint(0, 4 * size, (bs,), device=device)
    tables = torch.zeros(bs + 3, TABLE_SIZE, dtype=torch.int16, device=device)
    before = torch.randint(-(2**31), -1, (bs + 3, size), dtype=torch.int32, device=device)
    got, want = (tables.clone(), before.clone()), (tables.clone(), before.clone())
    add_bigrams(got[0], *args, got[1], seq_lens)
    reference(want[0], *args, want[1], seq_lens)
    assert all(map(torch.equal, got, want))
    reference(tables, *args)
    assert torch.equal(got[0], tables)
    for row, first, count, out, tokens in zip(args[0], seq_lens, args[3], args[4], args[2], strict=True):
        places = (first + 1 + torch.arange(count * (1 - out), device=device)) % size
        assert torch.equal(got[1][row, places].long(), tokens[: len(places)])
        assert int((got[1][row] != before[row]).sum()) == len(places)


@pytest.mark.parametrize("add", [add_bigrams, reference])
def test_the_newest_of_pairs_that_share_a_place_is_found(add, device):
    firsts, seconds = torch.meshgrid(*[torch.arange(400, device=device)] * 2, indexing="ij")
    places, tags = locate(firsts, seconds)
    zeros, one = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, dtype=torch.int64, device=device)
    # Texts of four tokens, whose first and last pairs have the same index.
    first, second = 0, 1
    other = (places == places[first, second]).nonzero()
    for third, fourth in other[:20].tolist():
        tables = torch.zeros(1, TABLE_SIZE, dtype=torch.int16, device=device)
        add(tables, zeros, zeros + first, torch.tensor([[second, third, fourth]], device=device), 3 * one, zeros)
        assert tables[0, places[third, fourth]] == tags[third, fourth]
        assert torch.equal(tables, tables_of(torch.tensor([[first, second, third, fourth]], device=device), 4 * one))
    assert len(other) > 20


@pytest.mark.parametrize("lens", [[], [0], [1, 0, 2], [64, 65, 63, 1], [1000, 257], [4096]])
@pytest.mark.parametrize("vocab", [3, 2**31])
def test_texts_begin_as_in_the_reference(lens, vocab, device):
    texts = torch.randint(-vocab, vocab, (len(lens), 1 + max(lens, default=0)), device=device).to(torch.int32)
    texts[:, 0] = torch.tensor(lens, dtype=torch.int32, device=device)
    before = torch.full((len(lens) + 2, TABLE_SIZE), 7, dtype=torch.int16, device=device)
    next_tokens = torch.randint(0, vocab, (len(lens),), dtype=torch.int32, device=device)
    args = (torch.randperm(len(lens) + 2, device=device)[: len(lens)], texts, next_tokens)
    got, want = before.clone(), before.clone()
    begin_bigrams(got, *args)
    begin_reference(want, *args)
    assert torch.equal(got, want)
    assert (got == 7).all(dim=1).sum() == 2
