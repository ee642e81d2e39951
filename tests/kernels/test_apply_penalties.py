import pytest
import torch

from sglang_dflash.ops.kernels.apply_penalties import apply_penalties
from sglang_dflash.ops.reference.apply_penalties import apply_penalties as reference

NUM_SLOTS = 7


@pytest.mark.parametrize("bs", [0, 1, 3])
@pytest.mark.parametrize("block_size", [1, 2, 10, 16])
@pytest.mark.parametrize("vocab", [3, 1024, 1025])
def test_matches_reference(bs, block_size, vocab, device):
    # Rows with a stride larger than their length, as in a padded vocabulary.
    padded = 5 * torch.randn(bs * block_size, vocab + 3, device=device)
    logits, want = padded[:, :vocab], padded[:, :vocab].clone()
    block_tokens = torch.randint(0, min(vocab, 5), (bs, block_size), device=device)
    counts = torch.randint(0, 3, (NUM_SLOTS, vocab), dtype=torch.int32, device=device)
    slots = torch.randperm(NUM_SLOTS, device=device)[:bs]
    frequency, presence = torch.rand(2, bs, device=device)
    repetition = 0.5 + torch.rand(bs, device=device)
    # One request has no penalties.
    frequency[:1], presence[:1], repetition[:1] = 0, 0, 1
    others = padded[:, vocab:].clone()

    apply_penalties(logits, block_tokens, counts, slots, frequency, presence, repetition)

    reference(want, block_tokens, counts, slots, frequency, presence, repetition)
    torch.testing.assert_close(logits, want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(padded[:, vocab:], others, rtol=0, atol=0)


@pytest.mark.parametrize("apply", [apply_penalties, reference])
def test_by_hand(apply, device):
    logits = torch.tensor([[8.0, 4, -2, 1], [8, 4, -2, 1], [8, 4, -2, 1]], device=device)
    # Token 1 was generated twice before the block. The block appends token 2, then token 0.
    counts = torch.tensor([[0, 2, 0, 0]], dtype=torch.int32, device=device)

    def one(value):
        return torch.tensor([value], device=device)

    apply(logits, torch.tensor([[1, 2, 0]], device=device), counts, one(0), one(0.5), one(1.0), one(2.0))

    assert logits.tolist() == [[8, 1, -2, 1], [8, 1, -7, 1], [3.25, 1, -7, 1]]
