"""Trees of drafts for the batch-1 oracle, in plain Python: best first over the drafter's log probabilities.

Source: DDTree (arXiv 2604.12989). Written for reading, apart from the operations of the served cycle.
"""

import heapq
import math
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor


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


def grow_tree(log_probs: Tensor, token_ids: Tensor, num_nodes: int, num_candidates: int) -> Tree:
    """The `num_nodes - 1` most probable beginnings of a block, of the best candidates of every row.

    Args:
        log_probs: [B - 1, V], row i of the token at depth i + 1.
        token_ids: [V] int64, the token of each column.
    """
    columns = log_probs.topk(num_candidates, dim=-1).indices
    best = log_probs.gather(1, columns).tolist()
    tokens, parents, depths, sums = [], [0], [0], [0.0]
    order = count()
    # The path's negated log probability, ties in the order of arrival, its depth, the rank of its last token, and the
    # node before that.
    heap = [(-best[0][0], next(order), 1, 0, 0)]
    while heap and len(parents) < num_nodes:
        negated, _, depth, rank, parent = heapq.heappop(heap)
        tokens.append(token_ids[columns[depth - 1, rank]])
        parents.append(parent)
        depths.append(depth)
        sums.append(-negated)
        if rank + 1 < num_candidates:
            heapq.heappush(heap, (-sums[parent] - best[depth - 1][rank + 1], next(order), depth, rank + 1, parent))
        if depth < len(best):
            heapq.heappush(heap, (negated - best[depth][0], next(order), depth + 1, 0, len(parents) - 1))
    return Tree(torch.stack(tokens), parents, depths, sums, -heap[0][0] if heap else -math.inf)


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


def margin(
    tree: Tree, path: list[int], target_tokens: Tensor, log_probs: Tensor, token_ids: Tensor, num_candidates: int
) -> float:
    """How far the drafter's log probabilities are from a tree of which another path would be accepted.

    Where that is about a rounding error, a drafter that sums in another order may rightly accept another one.

    Args:
        path: the nodes that are accepted.
        target_tokens: [N] int64, the target's token after each node.
        log_probs, token_ids, num_candidates: as in `grow_tree`.
    """
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
        refused = log_probs[depth, token_ids == target_tokens[path[-1]]]
        if len(refused):
            to_be_a_node = tree.log_probs[-1] - tree.log_probs[path[-1]] - float(refused)
            to_be_a_candidate = float(ranked[depth, num_candidates - 1] - refused)
            distances.append(max(to_be_a_node, to_be_a_candidate))
    return min(distances)
