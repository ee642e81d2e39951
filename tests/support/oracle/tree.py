"""Drafts for the batch-1 oracle in plain Python: chains, and trees by best-first search over log probabilities.

Source: DDTree (arXiv 2604.12989). It is written to be read, and shares no code with the served cycle's operations.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, pairwise

import torch
from torch import Tensor

# Candidates of each position of a chain.
CANDIDATES = 16
# Longer matches of the text's end are not preferred to each other.
LOOKUP = 6


class Text:
    """A request's text so far, with the set of its token pairs.

    The cycle keeps a 16-bit tag of each pair in a table of 4,096 entries, where a later pair overwrites an earlier one.
    This class does the same, because an overwritten pair sometimes changes a tree.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.last = tokens[-1] if tokens else None
        self._kept = list(tokens[-16384:])
        self._tags = dict(self._locate(first, second) for first, second in pairwise(tokens))

    @staticmethod
    def _locate(first: int, second: int) -> tuple[int, int]:
        hashed = ((first * 0x9E3779B1 ^ second * 0x85EBCA6B) & 0xFFFFFFFF) * 0xC2B2AE35
        return hashed >> 20 & 0xFFF, hashed >> 4 & 0xFFFF

    def has(self, first: int, second: int) -> bool:
        place, tag = self._locate(first, second)
        return self._tags.get(place, 0) == tag

    def copy(self, num_depths: int) -> tuple[list[int], int]:
        """Return what followed the text's end when the text had it before, and how many tokens match there.

        It is the longest match of 3 tokens or more. Matches of LOOKUP tokens are not preferred to each other, and of
        equals the last is taken. What follows it begins again where the text ends.
        """
        kept, longest, start = self._kept, 0, 0
        for place in range(len(kept) - 1, 0, -1):
            length = 0
            while length < min(place, 64) and kept[place - 1 - length] == kept[-1 - length]:
                length += 1
            if min(length, LOOKUP) > min(longest, LOOKUP):
                longest, start = length, place
        if longest < 3:
            return [], 0
        return [kept[start + depth % (len(kept) - start)] for depth in range(num_depths)], longest


@dataclass(frozen=True)
class Drafts:
    """Drafter's log probabilities of a block, with the text so far.

    Attributes:
        log_probs: [W - 1, V]. Row i is for depth i + 1.
        token_ids: [V] int64. Token of each column.
        num_candidates: number of candidates per depth.
        text: up to the bonus token, which is its last.
        pairs: returns the scores of tokens [K] at a depth >= 1 after a token, which are added to their logits; None:
            depths are independent.
        num_children: most candidates that may follow the same node. The copy's token may be one more.
        has_copies: what followed the text's end before is a path of drafts.
    """

    log_probs: Tensor
    token_ids: Tensor
    num_candidates: int
    text: Text
    pairs: Callable[[int, int, Tensor], Tensor] | None = None
    num_children: int | None = None
    has_copies: bool = True

    @cached_property
    def copy(self) -> tuple[list[int], int]:
        """Return the columns of the copy's tokens, of at most W - 1 depths, and how many tokens match before it."""
        if not self.has_copies:
            return [], 0
        tokens, length = self.text.copy(len(self.log_probs))
        return [(self.token_ids == token).nonzero().item() for token in tokens], length

    @cached_property
    def best(self) -> Tensor:
        """Return the columns of the best tokens per depth, best first: [W - 1, num_candidates] int64."""
        return self.log_probs.topk(self.num_candidates, dim=-1).indices

    @cached_property
    def columns(self) -> Tensor:
        """Return the candidates' columns, [W - 1, num_candidates] int64: the best, the copy's instead of the last."""
        columns = self.best.clone()
        for depth in range(1, len(self.log_probs) + 1):
            if self.is_placed(depth):
                columns[depth - 1, -1] = self.copy[0][depth - 1]
        return columns

    def is_placed(self, depth: int) -> bool:
        """Return whether the copy's token at a depth >= 1 is a candidate only because of the copy."""
        copied = self.copy[0]
        return depth <= len(copied) and copied[depth - 1] not in self.best[depth - 1].tolist()

    def copied(self, first: int | None, depth: int) -> int | None:
        """Return the column of the copy's token at a depth >= 1 after the draft `first`; None: the copy has no such."""
        copied = self.copy[0]
        if depth > len(copied) or (first is not None and first != int(self.token_ids[copied[depth - 2]])):
            return None
        return copied[depth - 1]

    def after(self, first: int | None, depth: int) -> Tensor:
        """Return log probabilities [V] of the tokens at a depth >= 1 after the draft `first`; None is the bonus token.

        With M tokens that match before it, the copy's token has M / (M + 4) of the probability, at most 0.95. The
        drafter adds to it where the token may follow without a copy.
        """
        row, column = self.drafted(first, depth), self.copied(first, depth)
        if column is None:
            return row
        matching = self.copy[1] + depth - 1
        weight = min(0.95, matching / (matching + 4))
        mixed = row + math.log1p(-weight)
        is_child = column in self.columns[depth - 1][self._drafted_ranks(row, depth)].tolist()
        mixed[column] = math.log(weight + (1 - weight) * float(row[column].exp()) * is_child)
        return mixed

    def children(self, first: int | None, depth: int) -> list[tuple[int, float]]:
        """Return the candidates at a depth >= 1 that may follow `first`, the most probable first: rank and log
        probability."""
        columns = self.columns[depth - 1]
        ranks = self._drafted_ranks(self.drafted(first, depth), depth)
        if (column := self.copied(first, depth)) is not None and column not in columns[ranks].tolist():
            ranks.append(columns.tolist().index(column))
        row = self.after(first, depth)[columns].tolist()
        return sorted(((rank, row[rank]) for rank in ranks), key=lambda child: -child[1])

    def _drafted_ranks(self, row: Tensor, depth: int) -> list[int]:
        """Return the candidates at a depth >= 1 that may follow without a copy, for what :meth:`drafted` returns."""
        return row[self.columns[depth - 1]].sort(descending=True, stable=True).indices[: self.num_children].tolist()

    def drafted(self, first: int | None, depth: int) -> Tensor:
        """Return what :meth:`after` would be without a copy.

        Candidates that follow `first` in the text count e^2 times as much, and all are normalised again. The drafter
        knows the bonus token, so depth 1 is unchanged. With pairs only the candidates have a probability.
        """
        row = self.log_probs[depth - 1].clone()
        columns = self.columns[depth - 1].tolist()
        if self.is_placed(depth):
            row[columns[-1]] = -math.inf
        if self.pairs is not None:
            tokens = self.token_ids[columns]
            scores = row[columns] + self.pairs(self.text.last if first is None else first, depth, tokens)
            if first is not None:
                scores = scores + 2 * torch.tensor([self.text.has(first, token) for token in tokens.tolist()])
            return torch.full_like(row, -torch.inf).index_put_((torch.tensor(columns),), scores.log_softmax(-1).to(row))
        if first is None:
            return row
        seen = [column for column in columns if self.text.has(first, int(self.token_ids[column]))]
        weighted = row.clone()
        weighted[seen] += 2
        return weighted - math.log1p(math.expm1(2) * float(row[seen].exp().sum()))


def follow_chain(drafts: Drafts) -> Tensor:
    """Return the most probable candidate of each depth after the draft before it: [W - 1] int64."""
    tokens = []
    for depth, columns in enumerate(drafts.columns, start=1):
        row = drafts.after(tokens[-1] if tokens else None, depth)
        tokens.append(int(drafts.token_ids[columns[row[columns].argmax()]]))
    return torch.tensor(tokens, device=drafts.token_ids.device)


def chain_margin(drafts: Drafts, draft_tokens: Tensor, target_tokens: Tensor) -> float:
    """Return the smallest change of the drafter's log probabilities that would change how many drafts are accepted.

    Args:
        drafts: of the chain.
        draft_tokens: [W - 1] int64. The chain.
        target_tokens: [W] int64. The target's token after the bonus token and after each draft.
    """
    least, first, num_candidates = math.inf, None, drafts.columns.shape[1]
    for depth, (draft, wanted) in enumerate(zip(draft_tokens.tolist(), target_tokens.tolist()), start=1):
        log_probs, columns = drafts.log_probs[depth - 1], drafts.columns[depth - 1]
        row, is_draft, is_wanted = drafts.after(first, depth), drafts.token_ids == draft, drafts.token_ids == wanted
        if draft != wanted:
            if is_wanted[columns].any():
                # The target's token could be the best,
                least = min(least, float(row[is_draft] - row[is_wanted]))
            elif is_wanted.any():
                # or become a candidate, and then the best.
                least = min(least, float(log_probs[columns[-1]] - log_probs[is_wanted]))
            return least
        # Another candidate could be the best, or the draft no candidate.
        best = row[columns].sort(descending=True).values
        least = min([least, *(best[:1] - best[1:2]).tolist()])
        if num_candidates < len(log_probs):
            least = min(least, float(log_probs[is_draft] - log_probs.topk(num_candidates + 1).values[-1]))
        first = draft
    return least


@dataclass(frozen=True)
class Tree:
    """Draft tree of at most N nodes. Node 0, the root, is the bonus token.

    Attributes:
        tokens: [N - 1] int64. Tokens of the nodes after the root.
        parents: parent of each node; the root's is itself.
        depths: depth of each node; the root's is 0.
        log_probs: log probability of each node's path, summed from the root, not ascending.
        next_log_prob: log probability of the path that would be the next node; -inf if there is none.
    """

    tokens: Tensor
    parents: list[int]
    depths: list[int]
    log_probs: list[float]
    next_log_prob: float

    def sees(self) -> Tensor:
        """Return [N, N] bool: whether the row's node sees the column's, which is itself or an ancestor."""
        seen = torch.eye(len(self.parents), dtype=torch.bool, device=self.tokens.device)
        for node, parent in enumerate(self.parents):
            seen[node] |= seen[parent]
        return seen


def grow_tree(drafts: Drafts, num_nodes: int) -> Tree:
    """Return the tree of the `num_nodes - 1` most probable prefixes of a block, among the candidates of each depth."""
    num_depths = len(drafts.log_probs)
    candidates = drafts.token_ids[drafts.columns].tolist()
    tokens, parents, depths, sums = [], [0], [0], [0.0]
    order = count()
    # All paths that may be next: negated log probability, order of arrival for ties, parent of the last token, and the
    # last token.
    heap = []

    def open_node(node: int) -> None:
        if (depth := depths[node]) < num_depths:
            for rank, log_prob in drafts.children(tokens[node - 1] if node else None, depth + 1):
                heapq.heappush(heap, (-sums[node] - log_prob, next(order), node, candidates[depth][rank]))

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
    """Return the nodes from the root on that hold the target's token after their parent. target_tokens: [N] int64."""
    path = [0]
    while True:
        wanted = int(target_tokens[path[-1]])
        children = (node for node in range(1, len(tree.parents)) if tree.parents[node] == path[-1])
        found = next((node for node in children if int(tree.tokens[node - 1]) == wanted), None)
        if found is None:
            return path
        path.append(found)


def margin(tree: Tree, path: list[int], target_tokens: Tensor, drafts: Drafts) -> float:
    """Return the smallest change of the drafter's log probabilities that would change the accepted path.

    If it is about a rounding error, a drafter that sums in another order may accept another path.

    Args:
        tree: the tree of `drafts`.
        path: the accepted nodes.
        target_tokens: [N] int64. The target's token after each node.
        drafts: of the tree.
    """
    log_probs, token_ids, num_candidates = drafts.log_probs, drafts.token_ids, drafts.num_candidates
    ranked = log_probs.sort(dim=-1, descending=True).values
    distances = [math.inf]
    if len(path) > 1:
        # The last node could lose its place to the next path,
        distances.append(tree.log_probs[path[-1]] - tree.next_log_prob)
        if drafts.num_children is not None and drafts.num_children < num_candidates:
            # or a node's token could lose its place to a token that is one child too many,
            for node in path[1:]:
                parent = tree.parents[node]
                first = int(tree.tokens[parent - 1]) if parent else None
                row = drafts.drafted(first, tree.depths[node])
                is_own = token_ids == tree.tokens[node - 1]
                copied = drafts.copied(first, tree.depths[node])
                if copied is not None and is_own[copied]:
                    continue
                own = row[is_own]
                distances.append(float(own - row.sort(descending=True).values[drafts.num_children]))
        if num_candidates < ranked.shape[1]:
            # or a node's token could lose its rank to a token that is not a candidate.
            for node in path[1:]:
                row, is_own = tree.depths[node] - 1, token_ids == tree.tokens[node - 1]
                is_placed = drafts.is_placed(row + 1)
                if not (is_placed and is_own[drafts.copy[0][row]]):
                    own = log_probs[row, is_own]
                    distances.append(float(own - ranked[row, num_candidates - is_placed]))
    depth = tree.depths[path[-1]]
    if depth < len(log_probs):
        # The target's token could become a node, for which it must be a candidate.
        is_refused = token_ids == target_tokens[path[-1]]
        if is_refused.any():
            last = int(tree.tokens[path[-1] - 1]) if depth else None
            after = drafts.after(last, depth + 1)[is_refused]
            copied = drafts.copied(last, depth + 1)
            is_copied = copied is not None and bool(is_refused[copied])
            to_be_a_node = tree.log_probs[-1] - tree.log_probs[path[-1]] - after
            # Pairs have no score for a token that is not a candidate. As one it could be a node.
            to_be_a_node = to_be_a_node.where(after > -torch.inf, -torch.inf)
            if drafts.num_children is not None and drafts.num_children < num_candidates:
                # Or one of too many children.
                drafted = drafts.drafted(last, depth + 1)
                least = drafted.sort(descending=True).values[drafts.num_children - 1]
                too_many = (least - drafted[is_refused]).where(after > -torch.inf, -torch.inf)
                to_be_a_node = torch.maximum(to_be_a_node, too_many) if not is_copied else to_be_a_node
            is_placed = drafts.is_placed(depth + 1)
            to_be_a_candidate = ranked[depth, num_candidates - 1 - is_placed] - log_probs[depth, is_refused]
            if is_copied:
                to_be_a_candidate = -math.inf
            distances.append(max(float(to_be_a_node), float(to_be_a_candidate)))
    return min(distances)
