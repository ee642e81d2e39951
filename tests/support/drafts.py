"""Random candidates of a drafter, for tests of the table of conditionals and of trees."""

from __future__ import annotations

import torch

from sglang_dflash.ops.bigrams import TABLE_SIZE, put
from sglang_dflash.types import DrawParameters

VOCAB = 1000


def tables_with(candidates: torch.Tensor, slots: torch.Tensor, share: float) -> torch.Tensor:
    """Return bigram tables, [slots + 3, TABLE_SIZE], that have this share of the pairs of candidates in a row."""
    pairs = torch.broadcast_tensors(candidates[:, :-1, :, None], candidates[:, 1:, None, :])
    first, second = (tokens.flatten(1) for tokens in pairs)
    tables = torch.zeros(len(slots) + 3, TABLE_SIZE, dtype=torch.int16, device=slots.device)
    if first.numel():
        is_pair = torch.rand(first.shape, device=slots.device) < share
        tables[slots] = put(tables[slots], first, second, is_pair)
    return tables


def parameters_for(bs: int, device: str, temperatures: list[float]) -> DrawParameters:
    """Return parameters of requests with these temperatures, in turn; 0 is greedy."""
    values = torch.tensor([temperatures[i % len(temperatures)] for i in range(bs)], device=device)
    parameters = DrawParameters.greedy(bs, device)
    parameters.temperatures.copy_(values.where(values > 0, 1.0))
    parameters.top_ks.copy_(torch.where(values > 0, 1 << 30, 1))
    return parameters


def drafts_for(bs: int, depths: int, k: int, device: str, share: float = 0.3) -> tuple:
    """Return the arguments of `fill_table`. The drafter is unsure for the first requests, so their trees are wide.

    Args:
        share: of the pairs of candidates that the requests' texts have.
    """
    logits = torch.randn(bs, depths, k, device=device).sort(dim=-1, descending=True).values
    logits *= torch.linspace(1, 9, bs, device=device)[:, None, None]
    candidates = torch.rand(bs, depths, VOCAB, device=device).argsort(dim=-1)[:, :, :k].contiguous()
    slots = torch.randperm(bs + 3, device=device)[:bs]
    return (
        candidates,
        logits,
        logits.logsumexp(dim=-1) + torch.rand(bs, depths, device=device),
        parameters_for(bs, device, [0, 1.0, 0.7]),
        torch.randint(0, 2**62, (bs,), device=device),
        tables_with(candidates, slots, share),
        torch.arange(bs, device=device) % 4 // 3,
        torch.randint(0, 50, (bs,), device=device),
        slots,
    )
