"""Scores of pairs of neighbouring drafts: the vectors of both tokens, and the factors that a hidden state gives.

A score is the product of two vectors of r numbers, of the draft before and of the draft, see
:class:`sglang_dflash.checkpoint.config.Pairs`. Tables of vectors have a row for every token of the target and are
copied on every tensor-parallel rank. What depends on hidden states is computed by one rank for all of them, because
ranks that round differently would draft differently.

Shapes as in :mod:`sglang_dflash.types`: bs requests, W draft length, K candidates, H hidden size, V vocabulary, r rank.
"""

from __future__ import annotations

import torch
from sglang.srt.distributed import tensor_model_parallel_all_gather
from sglang.srt.layers.linear import ColumnParallelLinear
from sglang.srt.utils import add_prefix
from torch import nn
from torch.nn import functional

from sglang_dflash.checkpoint.config import GATED, MARKOV, SELECTOR, Pairs
from sglang_dflash.types import PairVectors


class CandidateSelector(nn.Module):
    """Pairs whose vector of the draft before is multiplied by a projection of the hidden state.

    Modules and parameters have the names of checkpoints, under `candidate_selector`.
    """

    def __init__(self, pairs: Pairs, hidden_size: int, vocab_size: int, prefix: str) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, pairs.rank), requires_grad=False)
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, pairs.rank), requires_grad=False)
        self.hidden_projection = ColumnParallelLinear(
            hidden_size, pairs.rank, bias=False, gather_output=True, prefix=add_prefix("hidden_projection", prefix)
        )

    def forward(self, hidden_states: torch.Tensor, bonus_tokens: torch.Tensor, candidates: torch.Tensor) -> PairVectors:
        """Return the vectors of a cycle.

        Args:
            hidden_states: [bs, W - 1, H]. Those that predict the drafts, before the factor of the logits.
            bonus_tokens: [bs] int64.
            candidates: [bs, W - 1, K] int64. Drafts of each position.
        """
        bs, depths, k = candidates.shape
        factors = self.hidden_projection(hidden_states.flatten(0, 1))[0].view(bs, depths, 1, -1)
        return PairVectors(self.predecessor_codebook, self.successor_codebook, factors.expand(-1, -1, k, -1))


class MarkovHead(nn.Module):
    """Pairs whose vector of the draft before is taken as it is, or is multiplied by a gate.

    DSpark adds such scores to the logits of all tokens, one position after the other. Here the K candidates of a
    position get them, all positions at once. Modules have the names of checkpoints, under `markov_head`.
    """

    def __init__(self, pairs: Pairs, hidden_size: int, vocab_size: int, prefix: str) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, pairs.rank)
        self.markov_w2 = nn.Linear(pairs.rank, vocab_size, bias=False)
        self.gate_proj = None
        if pairs.kind == GATED:
            # Of the hidden state, then the vector. The ranks' parts are gathered in `forward`.
            inputs = hidden_size + pairs.rank
            self.gate_proj = ColumnParallelLinear(inputs, pairs.rank, prefix=add_prefix("gate_proj", prefix))

    def forward(self, hidden_states: torch.Tensor, bonus_tokens: torch.Tensor, candidates: torch.Tensor) -> PairVectors:
        """See :meth:`CandidateSelector.forward`."""
        gates = None if self.gate_proj is None else self._gates(hidden_states, bonus_tokens, candidates)
        return PairVectors(self.markov_w1.weight, self.markov_w2.weight, gates)

    def _gates(self, hidden_states: torch.Tensor, bonus_tokens: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Return the gates of the candidates before each position, [bs, W - 1, K, r]."""
        bs, depths, k = candidates.shape
        before = torch.cat((bonus_tokens[:, None, None].expand(bs, 1, k), candidates), dim=1)[:, :depths]
        weight, hidden_size = self.gate_proj.weight, hidden_states.shape[-1]
        of_hidden = functional.linear(hidden_states, weight[:, :hidden_size], self.gate_proj.bias)
        of_token = functional.linear(self.markov_w1(before), weight[:, hidden_size:])
        return tensor_model_parallel_all_gather(of_hidden[:, :, None] + of_token).sigmoid()


# The name that checkpoints give each kind of pairs, and its module.
_MODULES = {
    SELECTOR: ("candidate_selector", CandidateSelector),
    MARKOV: ("markov_head", MarkovHead),
    GATED: ("markov_head", MarkovHead),
}


def build_pairs(
    pairs: Pairs, hidden_size: int, vocab_size: int, prefix: str
) -> tuple[str, CandidateSelector | MarkovHead]:
    """Return the name that checkpoints give a drafter's module, and the module without weights."""
    name, module = _MODULES[pairs.kind]
    return name, module(pairs, hidden_size, vocab_size, add_prefix(name, prefix))
