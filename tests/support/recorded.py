"""Recorded drafts with which a test knows what every cycle commits."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

# Tokens with drafts, drafts per token, candidates per draft.
LENGTH, DEPTHS, CANDIDATES = 240, 15, 16
# Token ids fall, so no text of rising ids, as bench_serving's random prompts are, has two of them in a row.
ANSWER = list(range(5 + LENGTH + DEPTHS, 4, -1))


def record(file: Path) -> str:
    """Write drafts of one answer, in which the right token is always the second candidate. Return the file's name."""
    answer = torch.tensor(ANSWER)
    right = answer[1:].unfold(0, DEPTHS, 1)[:LENGTH]
    # Wrong tokens are in no answer.
    candidates = (300 + torch.arange(CANDIDATES)).expand(LENGTH, DEPTHS, CANDIDATES).clone()
    candidates[..., 1] = right
    # Log probabilities of -11/16, -12/16, and very small ones.
    sixteenths = torch.tensor([11, 12] + [200] * (CANDIDATES - 2)).expand_as(candidates)
    records = {
        "answers": answer[None].int(),
        "num_tokens": torch.tensor([LENGTH]),
        "candidates": candidates[None].to(torch.uint16),
        "sixteenths": sixteenths[None].to(torch.uint8).contiguous(),
    }
    save_file(records, file)
    return str(file)
