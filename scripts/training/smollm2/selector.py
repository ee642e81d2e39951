"""Scores of pairs whose codebooks are projections of the target's embedding, for training.

A table of its own for every token would have too few examples of most tokens. The projections see all of them.

Letters in shapes: T tokens, K candidates, V vocabulary, H hidden size, r rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class EmbeddingSelector(nn.Module):
    """Takes the place of `CandidateSelector` in training. :meth:`checkpoint` gives the tensors of that module.

    Pairs begin without a score: the successors' projection is zero.
    """

    def __init__(self, embedding: Tensor, rank: int, num_candidates: int):
        super().__init__()
        hidden_size = embedding.shape[1]
        self.num_candidates = num_candidates
        # [V, H]. Tokens' vectors have equal lengths, so rare tokens learn as fast as others.
        self.register_buffer("tokens", F.rms_norm(embedding, (hidden_size,)), persistent=False)
        self.predecessor = nn.Linear(hidden_size, rank, bias=False)
        self.successor = nn.Linear(hidden_size, rank, bias=False)
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        nn.init.normal_(self.predecessor.weight, std=hidden_size**-0.5)
        nn.init.zeros_(self.successor.weight)
        nn.init.normal_(self.hidden_projection.weight, std=hidden_size**-0.5)

    def forward(self, before: Tensor, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return the scores [..., K] of tokens [..., K] after `before` [...], for hidden states [..., H]."""
        predecessors = F.linear(self.tokens, self.predecessor.weight.to(self.tokens.dtype))
        successors = F.linear(self.tokens, self.successor.weight.to(self.tokens.dtype))
        left = F.embedding(before, predecessors).float() * self.hidden_projection(hidden).float()
        return (F.embedding(tokens, successors).float() * left[..., None, :]).sum(-1)

    def checkpoint(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint's selector, by their names, in float32."""
        tokens = self.tokens.float()
        return {
            "predecessor_codebook": F.linear(tokens, self.predecessor.weight),
            "successor_codebook": F.linear(tokens, self.successor.weight),
            "hidden_projection.weight": self.hidden_projection.weight,
        }

    @torch.no_grad()
    def read_checkpoint(self, tensors: dict[str, Tensor]) -> None:
        """Take the projections that give the codebooks of `tensors` best. It undoes :meth:`checkpoint`."""
        # Normal equations need no [V, H] factorization, and the vectors of tokens are far from dependent.
        tokens = self.tokens.double()
        gram = tokens.t() @ tokens
        for projection, name in ((self.predecessor, "predecessor"), (self.successor, "successor")):
            codebook = tensors[f"{name}_codebook"].to(tokens)
            projection.weight.copy_(torch.linalg.solve(gram, tokens.t() @ codebook).t())
        self.hidden_projection.weight.copy_(tensors["hidden_projection.weight"])


def selector_loss(
    selector: nn.Module,
    hidden: Tensor,
    target_hidden: Tensor,
    head: Tensor,
    candidates: Tensor,
    before: Tensor,
    labels: Tensor,
    weights: Tensor,
    soft_share: float,
) -> Tensor:
    """Return the weighted sum of cross entropies among the candidates, to the labels and to the target's distribution.

    A label that is no candidate takes the place of the last one.

    Args:
        selector: scores pairs.
        hidden, target_hidden: [T, H]. The inputs of the head, of the drafter and of the target.
        head: [V, H], in the dtype of the matrix products.
        candidates: [T, K] int64. The drafter's best tokens.
        before: [T] int64. The text's tokens before the labels.
        labels: [T] int64. Tokens that the target holds best after the text.
        weights: [T] float32.
        soft_share: weight of the target's distribution over the candidates; the labels have the rest.

    Returns:
        A scalar, float32.
    """
    is_label = candidates == labels[:, None]
    last = torch.where(is_label.any(-1), candidates[:, -1], labels)
    candidates = torch.cat([candidates[:, :-1], last[:, None]], dim=-1)
    rows = head[candidates]
    logits, target_logits = (
        (rows @ states.to(head.dtype)[..., None])[..., 0].float() for states in (hidden, target_hidden)
    )
    log_chances = (logits + selector(before, hidden, candidates)).log_softmax(-1)
    wanted = soft_share * target_logits.softmax(-1) + (1 - soft_share) * (candidates == labels[:, None]).float()
    return -(weights * (wanted * log_chances).sum(-1)).sum()
