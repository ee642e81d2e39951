"""Trees of drafts for the batch-1 oracle, in plain Python: best first over the drafter's log probabilities.

Source: DDTree (arXiv 2604.12989). Written for reading, apart from the operations of the served cycle.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, pairwise

import torch
from torch import Tensor


class Text:
    """Which tokens have followed each other in a request's text so far.

    Of each pair the cycle keeps a tag of 16 bits in one of 4,096 places, both from a hash, where a later pair replaces
    it: so does this, as now and then it makes another tree.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tags = dict(self._locate(first, second) for first, second in pairwise(tokens))

    @staticmethod
    def _locate(first: int, second: int) -> tuple[int, int]:
        hashed = ((first * 0x9E3779B1 ^ second * 0x85EBCA6B) & 0xFFFFFFFF) * 0xC2B2AE35
        return hashed >> 20 & 0xFFF, hashed >> 4 & 0xFFFF

    def has(self, first: int, second: int) -> bool:
        place, tag = self._locate(first, second)
        return self._tags.get(place, 0) == tag


@dataclass(frozen=True)
class Drafts:
    """What a drafter says of a block, and what the text so far says about it.

    Attributes:
        log_probs: [B - 1, V], row i of the token at depth i + 1.
        token_ids: [V] int64, the token of each column.
        num_candidates: of each row, that a tree may have.
        text: up to the bonus token.
    """

    log_probs: Tensor
    token_ids: Tensor
    num_candidates: int
    text: Text

    @cached_property
    def columns(self) -> Tensor:
        """[B - 1, num_candidates] int64, of the best tokens of every row, the most probable first."""
        return self.log_probs.topk(self.num_candidates, dim=-1).indices

    def behind(self, first: int | None, depth: int) -> Tensor:
        """[V] log probabilities of the tokens at a depth from 1 on, behind a draft; at depth 1 behind the bonus token.

        The drafter does not know which draft it is. Those candidates that the text has right after it count e^2 times
        as much, and all are divided by their sum. The bonus token the drafter knows.
        """
        row = self.log_probs[depth - 1]
        if first is None:
            return row
        columns = self.columns[depth - 1].tolist()
        seen = [column for column in columns if self.text.has(first, int(self.token_ids[column]))]
        weighted = row.clone()
        weighted[seen] += 2
        return weighted - math.log1p(math.expm1(2) * float(row[seen].exp().sum()))


@dataclass(frozen=True)
class Tree:
    """N nodes or fewer; node 0 is the bonus token.

    Attributes:
        tokens: [N - 1] int64, of the nodes behind the root.
        parents: the node before each node; the root's is itself.
        depths: of each node; the root's is 0.
        log_probs: of each node's path, summed from the root, not ascending.
        next_log_prob: of the path that would be the next node; -inf if there is none.
    """

    tokens: Tensor
    parents: list[int]
    depths: list[int]
    log_probs: list[float]
    next_log_prob: float

    def sees(self) -> Tensor:
        """[N, N] bool: whether the row's node sees the column's, itself and those before it on its path."""
        seen = torch.eye(len(self.parents), dtype=torch.bool, device=self.tokens.device)
        for node, parent in enumerate(self.parents):
            seen[node] |= seen[parent]
        return seen


def grow_tree(drafts: Drafts, num_nodes: int) -> Tree:
    """The `num_nodes - 1` most probable beginnings of a block, of the best candidates of every row."""
    num_depths = len(drafts.log_probs)
    candidates = drafts.token_ids[drafts.columns].tolist()
    tokens, parents, depths, sums = [], [0], [0], [0.0]
    order = count()
    # Every path that may be next: its negated log probability, ties in the order of arrival, the node before its last
    # token, and that token.
    heap = []

    def open_node(node: int) -> None:
        if (depth := depths[node]) < num_depths:
            row = drafts.behind(tokens[node - 1] if node else None, depth + 1)[drafts.columns[depth]]
            for token, log_prob in zip(candidates[depth], row.tolist(), strict=True):
                heapq.heappush(heap, (-sums[node] - log_prob, next(order), node, token))

    open_node(0)
    while heap and len(parents) < num_nodes:
        negated, _, parent, token = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        sums.append(-negated)
        open_node(len(parents) - 1)
    next_log_prob = -heap[0][0] if heap else -math.inf
    return Tree(torch.tensor(tokens, device=drafts.token_ids.device), parents, depths, sums, next_log_prob)


def accept_path(tree: Tree, target_tokens: Tensor) -> list[int]:
    """The nodes, from the root on, that hold the target's token after the one before: [N] int64 -> at most N nodes."""
    path = [0]
    while True:
        wanted = int(target_tokens[path[-1]])
        behind = (node for node in range(1, len(tree.parents)) if tree.parents[node] == path[-1])
        found = next((node for node in behind if int(tree.tokens[node - 1]) == wanted), None)
        if found is None:
            return path
        path.append(found)


def margin(tree: Tree, path: list[int], target_tokens: Tensor, drafts: Drafts) -> float:
    """How far the drafter's log probabilities are from a tree of which another path would be accepted.

    Where that is about a rounding error, a drafter that sums in another order may rightly accept another one.

    Args:
        path: the nodes that are accepted.
        target_tokens: [N] int64, the target's token after each node.
        drafts: that the tree is of.
    """
    log_probs, token_ids, num_candidates = drafts.log_probs, drafts.token_ids, drafts.num_candidates
    ranked = log_probs.sort(dim=-1, descending=True).values
    distances = [math.inf]
    if len(path) > 1:
        # The last node might have given way to the next one,
        distances.append(tree.log_probs[path[-1]] - tree.next_log_prob)
        if num_candidates < ranked.shape[1]:
            # or a node's token to one that was not among the candidates.
            for node in path[1:]:
                row = tree.depths[node] - 1
                own = log_probs[row, token_ids == tree.tokens[node - 1]]
                distances.append(float(own - ranked[row, num_candidates]))
    depth = tree.depths[path[-1]]
    if depth < len(log_probs):
        # The target's token might have been a node, and a candidate.
        is_refused = token_ids == target_tokens[path[-1]]
        if is_refused.any():
            last = int(tree.tokens[path[-1] - 1]) if depth else None
            to_be_a_node = tree.log_probs[-1] - tree.log_probs[path[-1]] - drafts.behind(last, depth + 1)[is_refused]
            to_be_a_candidate = ranked[depth, num_candidates - 1] - log_probs[depth, is_refused]
            distances.append(max(float(to_be_a_node), float(to_be_a_candidate)))
    return min(distances)
