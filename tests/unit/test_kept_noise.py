"""Trees of drafts that are grown from the noise of the target's draws leave the distribution of the text alone."""

from __future__ import annotations

import pytest
import torch
from support.chi_square import chi_square

from sglang_dflash import ops
from sglang_dflash.ops.bigrams import TABLE_SIZE
from sglang_dflash.types import DrawParameters, Trees

NUM_TEXTS, NUM_NEW = 4_000, 3
# Two tokens, which do not depend on those before.
TARGET, DRAFTER = torch.tensor([0.5, 0.5]), torch.tensor([0.1, 0.9])
SIZES = [(3, 2), (4, 2), (4, 3), (8, 4)]


def texts(num_nodes: int, depths: int, is_kept: bool = True) -> tuple[torch.Tensor, int]:
    """Sample texts by decode cycles of trees.

    Args:
        is_kept: whether a request keeps its key; otherwise each cycle has noise of its own.

    Returns:
        tokens: [NUM_TEXTS, NUM_NEW] int64.
        cycles: decode cycles until all texts had that many tokens.
    """
    n, k = NUM_TEXTS, len(DRAFTER)
    generator = torch.Generator().manual_seed(0)

    def new_keys() -> torch.Tensor:
        return torch.randint(0, 2**62, (n,), generator=generator)

    parameters = DrawParameters.greedy(n, "cpu")
    parameters.top_ks.fill_(1 << 30)
    keys = new_keys()
    order = DRAFTER.argsort(descending=True)
    candidates = order.expand(n, depths, k).contiguous()
    logits = DRAFTER.log()[order].expand(n, depths, k).contiguous()
    none, no_slots = torch.zeros(n, dtype=torch.int64), torch.zeros(1, 64, dtype=torch.int32)
    bigrams = torch.zeros(1, TABLE_SIZE, dtype=torch.int16)
    seq_lens, bonus_tokens = torch.ones_like(none), none
    tokens = torch.full((n, 1 + NUM_NEW + depths + 1), -1)
    cycles = 0
    while (seq_lens < 1 + NUM_NEW).any():
        if not is_kept:
            keys = new_keys()
        trees = Trees.empty(n, num_nodes, "cpu")
        table = ops.fill_table(
            candidates, logits, torch.zeros(n, depths), parameters, keys, bigrams, none, seq_lens, none
        )
        ops.grow_trees(bonus_tokens, candidates, *table, none, seq_lens, none, no_slots, trees)
        target_logits = TARGET.log().expand(n * num_nodes, k).contiguous()
        maxima, target_tokens = ops.row_max(target_logits)
        ops.sample_rows(target_logits, maxima, target_tokens, parameters, keys, trees.positions)
        shape = (n, num_nodes)
        accepted, _ = ops.accept_paths(
            trees.tokens.view(shape), trees.parents, target_tokens.view(shape), seq_lens, min(num_nodes, depths + 1)
        )
        for j in range(accepted.out_tokens.shape[1]):
            is_new = (j < accepted.accept_lens) & (seq_lens + j <= NUM_NEW)
            tokens[is_new, (seq_lens + j)[is_new]] = accepted.out_tokens[is_new, j]
        seq_lens, bonus_tokens = accepted.new_seq_lens.to(torch.int64), accepted.bonus_tokens
        # A text that is done waits at its end.
        seq_lens, cycles = seq_lens.clamp(max=1 + NUM_NEW), cycles + 1
    return tokens[:, 1 : 1 + NUM_NEW], cycles


def p_value(tokens: torch.Tensor) -> float:
    """Return the p-value of a chi-square test of texts against the target's distribution."""
    code = (tokens * torch.tensor([4, 2, 1])).sum(dim=1)
    return chi_square(torch.bincount(code, minlength=8), torch.full((8,), NUM_TEXTS / 8))


def test_texts_have_the_target_distribution():
    assert p_value(texts(4, 2)[0]) > 1e-3


def test_new_noise_in_each_cycle_is_biased():
    """It has to be kept: which drafts a tree has room for depends on the noise of later positions."""
    assert p_value(texts(4, 2, is_kept=False)[0]) < 1e-4


@pytest.mark.parametrize("size", SIZES[1:])
def test_texts_do_not_depend_on_the_tree(size):
    """A text is a function of its key: trees of other sizes take other cycles, and find the same tokens."""
    (want, slow), (got, fast) = texts(*SIZES[0]), texts(*size)
    assert torch.equal(got, want)
    assert fast <= slow
