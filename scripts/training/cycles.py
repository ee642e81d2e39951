"""Committed tokens of the cycles over a text that the target wrote alone, for chains and for trees.

A draft is accepted if the target chooses the same token, greedily or by sampling. So the text determines what every
cycle would have committed.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash import ops
from sglang_dflash.ops.bigrams import tables_of
from sglang_dflash.types import DrawParameters, Trees


def num_correct_in_trees(
    logits: Tensor, labels: Tensor, texts: Tensor, lens: Tensor, sizes: Sequence[int], num_candidates: int
) -> Tensor:
    """Return the number of the text's tokens that are on a path of each block's tree, from the root on.

    Letters in shapes: M blocks.

    Args:
        logits: [M, W - 1, V]. The drafter's.
        labels: [M, W - 1] int64. The tokens that the target wrote; -1 after the text's end.
        texts: [M, T] int64. The text before each block, and the block's first token.
        lens: [M] int64. Lengths of those texts.
        sizes: numbers of nodes of a tree, with the root.
        num_candidates: candidates per depth, at most 16.

    Returns:
        [len(sizes), M] int64.
    """
    num_blocks, depths, _ = logits.shape
    values, columns, log_sums = ops.top_columns(logits.flatten(0, 1), num_candidates)
    candidates, values = (best.view(num_blocks, depths, -1) for best in (columns, values))
    log_sums = log_sums.view(num_blocks, depths)
    # With an empty context the position of a node is its depth.
    zeros = torch.zeros(num_blocks, dtype=torch.int64, device=logits.device)
    own_rows, tables = torch.arange(num_blocks, device=logits.device), tables_of(texts, lens)
    # No token follows the last depth.
    labels = F.pad(labels, (0, 1), value=-1)
    # Texts are given, so trees have no part in the noise that drew them.
    greedy = DrawParameters.greedy(num_blocks, logits.device)
    table = ops.fill_table(candidates, values, log_sums, greedy, zeros, tables, zeros, zeros, own_rows)
    num_correct = []
    for num_nodes in sizes:
        trees = Trees.empty(num_blocks, num_nodes, logits.device)
        slots = torch.zeros((num_blocks, num_nodes), dtype=torch.int32, device=logits.device)
        ops.grow_trees(zeros, candidates, *table, zeros, zeros, own_rows, slots, trees)
        tokens, node_depths = (rows.view(num_blocks, num_nodes) for rows in (trees.tokens, trees.positions))
        accepted, _ = ops.accept_paths(tokens, trees.parents, labels.gather(1, node_depths), zeros, depths + 1)
        num_correct.append(accepted.accept_lens.to(torch.int64) - 1)
    return torch.stack(num_correct)


def walk(length: int, num_correct: list[int]) -> list[int]:
    """Return the tokens that each cycle commits over a text of `length` tokens, of which the prefill gives the first.

    Args:
        length: tokens of the text.
        num_correct: correct drafts of a cycle that starts at each token.
    """
    at, committed = 0, []
    while at < length - 1:
        committed.append(min(num_correct[at] + 1, length - 1 - at))
        at += committed[-1]
    return committed


def ratio(tokens: Tensor, cycles: Tensor) -> tuple[float, float]:
    """Return all tokens over all cycles, and the standard error of that ratio. Both inputs are [prompts]."""
    mean = tokens.sum() / cycles.sum()
    spread = (tokens - mean * cycles).square().sum() * len(tokens) / max(1, len(tokens) - 1)
    return round(float(mean), 3), round(float(spread.sqrt() / cycles.sum()), 3)
