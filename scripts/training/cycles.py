"""What cycles would commit of a text that the target has written alone, in chains and in trees.

A proposal of one token is accepted if the target draws that very token, be it greedy or sampled. So such a text says
what every cycle would have committed.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash import ops
from sglang_dflash.ops.bigrams import tables_of
from sglang_dflash.types import Trees


def num_correct_in_trees(
    logits: Tensor, labels: Tensor, texts: Tensor, lens: Tensor, sizes: Sequence[int], num_candidates: int
) -> Tensor:
    """How many tokens of the target's text are on a path of each block's tree, from the root on.

    Args:
        logits: [M, B - 1, vocab], the drafter's, of M blocks.
        labels: [M, B - 1] int64, the tokens that the target wrote; -1 behind its text.
        texts: [M, T] int64, before each block and with the token that it begins with.
        lens: [M] int64, tokens of those.
        sizes: of trees, in nodes, the root among them.
        num_candidates: at each depth, at most 16.

    Returns:
        [len(sizes), M] int64.
    """
    num_blocks, depths, _ = logits.shape
    values, columns, log_sums = ops.top_columns(logits.flatten(0, 1), num_candidates)
    candidates, values = (best.view(num_blocks, depths, -1) for best in (columns, values))
    log_sums = log_sums.view(num_blocks, depths)
    # Of requests without a context: a node's position is its depth.
    zeros = torch.zeros(num_blocks, dtype=torch.int64, device=logits.device)
    own_rows, tables = torch.arange(num_blocks, device=logits.device), tables_of(texts, lens)
    # No token follows the last depth.
    labels = F.pad(labels, (0, 1), value=-1)
    num_correct = []
    for num_nodes in sizes:
        trees = Trees.empty(num_blocks, num_nodes, logits.device)
        slots = torch.zeros((num_blocks, num_nodes), dtype=torch.int32, device=logits.device)
        ops.grow_trees(zeros, candidates, values, log_sums, tables, zeros, zeros, own_rows, slots, trees)
        tokens, node_depths = (rows.view(num_blocks, num_nodes) for rows in (trees.tokens, trees.positions))
        accepted, _ = ops.accept_paths(tokens, trees.parents, labels.gather(1, node_depths), zeros, depths + 1)
        num_correct.append(accepted.accept_lens.to(torch.int64) - 1)
    return torch.stack(num_correct)


def walk(length: int, num_correct: list[int]) -> list[int]:
    """What the cycles over `length` tokens commit, of which the prefill gives the first; `num_correct` drafts at each
    of them."""
    at, committed = 0, []
    while at < length - 1:
        committed.append(min(num_correct[at] + 1, length - 1 - at))
        at += committed[-1]
    return committed


def ratio(tokens: Tensor, cycles: Tensor) -> tuple[float, float]:
    """All tokens over all cycles, of each prompt, and its standard error."""
    mean = tokens.sum() / cycles.sum()
    spread = (tokens - mean * cycles).square().sum() * len(tokens) / max(1, len(tokens) - 1)
    return round(float(mean), 3), round(float(spread.sqrt() / cycles.sum()), 3)
