"""Acceptance of requests that need SGLang's sampler, whose drafts are a chain among the nodes of a tree."""

from types import SimpleNamespace

import torch

from sglang_dflash import ops
from sglang_dflash.engine.cycle import DecodeCycle

SEQ_LEN, BONUS, WIDTH = 10, 42, 8


def accepted_lens(positions: list[int]) -> int:
    """Return how many tokens a block commits whose tokens are all the same, as are the target's.

    Args:
        positions: of the nodes.
    """
    found = []

    def accept_chains(block_tokens, target_tokens, seq_lens, req_pool_indices):
        found.append(ops.accept_prefix(block_tokens, target_tokens, seq_lens))

    output = SimpleNamespace(
        block_tokens=torch.full((1, WIDTH), BONUS),
        positions=torch.tensor([positions]),
        batch=SimpleNamespace(seq_lens=torch.tensor([SEQ_LEN]), req_pool_indices=torch.tensor([3])),
        accepted=SimpleNamespace(put=lambda index, accepted: None),
    )
    cycle = SimpleNamespace(verification=SimpleNamespace(accept_chains=accept_chains))
    DecodeCycle.accept_fallback(cycle, output, torch.tensor([0]), torch.full((1, WIDTH), BONUS))
    return int(found[0].accept_lens)


def test_padding_after_a_short_chain_is_not_accepted():
    """A drafter whose logits are NaN ends the chain. Padding repeats the root, and may equal the target's tokens."""
    whole = list(range(SEQ_LEN, SEQ_LEN + WIDTH))
    assert accepted_lens(whole) == WIDTH
    for num_drafts in range(WIDTH):
        padding = [SEQ_LEN] * (WIDTH - 1 - num_drafts)
        assert accepted_lens([*whole[: 1 + num_drafts], *padding]) == 1 + num_drafts
