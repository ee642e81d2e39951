"""Optional parts of a drafter in plain torch: convolutions over the rows of a block, and scores of pairs of drafts.

Letters in shapes: W rows of a block, H hidden size, V vocabulary, K candidates, r rank.
"""

import torch
from torch import Tensor, nn


class BlockConv(nn.Module):
    """The two convolutions around one sublayer: of its input (side 0) and of its output (side 1).

    Every row is a weighted sum of itself and the rows right before it in its block. A weight is the sum of a learned
    one, of the channel, and of a projection of the sublayer's input, of the row and a group of channels.
    """

    def __init__(self, hidden_size: int, taps: int, group_size: int):
        super().__init__()
        self.taps, self.group_size = taps, group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * hidden_size // group_size, bias=False)
        # The identity, from which training starts.
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def weights(self, x: Tensor) -> Tensor:
        """Return the weights [..., W, 2, taps, H] of both sides, for the sublayer's input x [..., W, H]."""
        delta = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        return self.base_kernel + delta.repeat_interleave(self.group_size, dim=-1)

    def forward(self, x: Tensor, weights: Tensor, side: int) -> Tensor:
        """Return x [..., W, H] convolved with the weights of one side."""
        convolved = torch.zeros_like(x)
        for tap in range(self.taps):
            shifted = torch.zeros_like(x)
            shifted[..., tap:, :] = x[..., : x.shape[-2] - tap, :]
            convolved = convolved + weights[..., side, tap, :] * shifted
        return convolved


class CandidateSelector(nn.Module):
    """Scores of a pair: the product of both tokens' vectors and of one that the hidden state gives."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int, top_k: int):
        super().__init__()
        self.num_candidates = top_k
        # Zeros, from which training starts: no pair is better than another.
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def forward(self, before: Tensor, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return the scores [..., K] of tokens [..., K] after `before` [...], for hidden states [..., H]."""
        left = self.predecessor_codebook[before] * self.hidden_projection(hidden)
        return (self.successor_codebook[tokens] @ left[..., None])[..., 0]


class MarkovHead(nn.Module):
    """Scores of a pair: the product of both tokens' vectors, of which a gate may weigh the first."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int, is_gated: bool):
        super().__init__()
        self.num_candidates = min(16, vocab_size)
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        self.gate_proj = nn.Linear(hidden_size + rank, rank) if is_gated else None

    def forward(self, before: Tensor, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return the scores [..., K] of tokens [..., K] after `before` [...], for hidden states [..., H]."""
        left = self.markov_w1(before)
        if self.gate_proj is not None:
            left = torch.sigmoid(self.gate_proj(torch.cat([hidden, left], dim=-1))) * left
        return (self.markov_w2.weight[tokens] @ left[..., None])[..., 0]
