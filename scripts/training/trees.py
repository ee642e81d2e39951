"""What a cycle would commit if the drafter's candidates became a tree, as the server grows them."""

import torch
from torch import Tensor

from sglang_dflash import ops
from sglang_dflash.types import Trees


def num_correct_in_trees(logits: Tensor, labels: Tensor, num_nodes: int, num_candidates: int) -> Tensor:
    """How many tokens of the target's text are on a path of each block's tree, from the root on.

    Args:
        logits: [M, B - 1, vocab], the drafter's, of M blocks.
        labels: [M, B - 1] int64, the tokens that the target wrote; -1 behind its text.
        num_nodes: of a tree, the root among them.
        num_candidates: at each depth, at most 16.

    Returns:
        [M] int64.
    """
    num_blocks, depths, _ = logits.shape
    values, columns, log_sums = ops.top_columns(logits.flatten(0, 1), num_candidates)
    candidates, values = columns.view(num_blocks, depths, -1), values.view(num_blocks, depths, -1)
    trees = Trees.empty(num_blocks, num_nodes, logits.device)
    # Of requests that share a row of slots, all without a context.
    zeros = torch.zeros(num_blocks, dtype=torch.int64, device=logits.device)
    slots = torch.zeros((1, num_nodes), dtype=torch.int32, device=logits.device)
    log_sums = log_sums.view(num_blocks, depths)
    ops.grow_trees(zeros, candidates, values, log_sums, zeros, zeros, zeros, slots, trees)

    tokens, at = trees.tokens.view(num_blocks, num_nodes), zeros
    num_correct = zeros
    is_on_path = torch.ones_like(zeros, dtype=torch.bool)
    for depth in range(depths):
        is_next = (trees.parents == at[:, None]) & (tokens == labels[:, depth, None])
        is_on_path = is_on_path & is_next.any(1)
        num_correct = num_correct + is_on_path
        at = torch.where(is_on_path, is_next.int().argmax(1), at)
    return num_correct
