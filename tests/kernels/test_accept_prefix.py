import pytest
import torch

from sglang_dflash.ops.kernels.accept_prefix import accept_prefix
from sglang_dflash.ops.reference.accept_prefix import accept_prefix as reference


@pytest.mark.parametrize("bs", [0, 1, 5, 64])
@pytest.mark.parametrize("block_size", [2, 8, 10, 16])
@pytest.mark.parametrize("vocab", [2, 3, 151936])
def test_matches_reference(bs, block_size, vocab, device):
    args = (
        torch.randint(0, vocab, (bs, block_size), device=device),
        torch.randint(0, vocab, (bs, block_size), device=device),
        torch.randint(0, 2**40, (bs,), device=device),
    )
    got, want = accept_prefix(*args), reference(*args)
    torch.testing.assert_close(got.packed, want.packed, rtol=0, atol=0)


@pytest.mark.parametrize("accept", [accept_prefix, reference])
def test_by_hand(accept, device):
    def tensor(rows):
        return torch.tensor(rows, device=device)

    got = accept(
        tensor([[9, 1, 2, 3], [9, 1, 2, 3], [9, 1, 2, 3], [9, 8, 2, 3]]),
        tensor([[1, 2, 3, 4], [1, 2, 5, 6], [7, 2, 3, 4], [7, 2, 3, 4]]),
        tensor([10, 20, 30, 40]),
    )
    assert got.accept_lens.tolist() == [4, 3, 1, 1]
    assert got.bonus_tokens.tolist() == [4, 5, 7, 7]
    assert got.new_seq_lens.tolist() == [14, 23, 31, 41]
    # A match after the first mismatch does not count.
    assert got.out_tokens.tolist() == [[1, 2, 3, 4], [1, 2, 5, 0], [7, 0, 0, 0], [7, 0, 0, 0]]


def test_take_outlives_the_next_cycle(device):
    block, target, lens = (torch.randint(0, 2, shape, device=device) for shape in ((4, 8), (4, 8), (4,)))
    captured = reference(block, target, lens)
    taken = captured.take(3)
    want = [t[:3].clone() for t in (captured.out_tokens, captured.accept_lens, captured.bonus_tokens)]
    captured.packed.fill_(-1)
    for got, expected in zip((taken.out_tokens, taken.accept_lens, taken.bonus_tokens), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert taken.out_tokens.is_contiguous()
