"""Computations of the drafter's training against plain implementations."""

import pytest
import torch
import torch.nn.functional as F
from support.oracle.drafter import ReferenceDrafter
from torch.nn.attention.flex_attention import create_block_mask
from training.blocks import draft_blocks, initialize, random_anchors, run_blocks
from training.muon import Muon, orthogonalize
from training.smollm2.block_attention import TILE, block_mask, tile_lists, visible_keys
from training.smollm2.drafter import Batch, before_labels, greedy_labels, random_sizes, tokens_before
from training.smollm2.head_loss import head_loss
from training.smollm2.selector import EmbeddingSelector, selector_loss
from training.smollm2.settings import DRAFTER_CONFIG

BLOCK_SIZE = 16
SMALL = {"head_dim": 8, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def sorted_anchors(num_sequences, length, count, generator):
    is_anchor = torch.ones(num_sequences, length, dtype=torch.bool)
    is_anchor[:, 0] = False
    return random_anchors(is_anchor, count, BLOCK_SIZE, generator).sort(dim=1).values


def test_loss_of_the_head_is_cross_entropy(generator):
    hidden = torch.randn(7, 12, generator=generator, requires_grad=True)
    head = torch.randn(33, 12, generator=generator)
    labels = torch.randint(33, (7,), generator=generator)
    weights = torch.tensor([0.3, 0.0, 0.1, 0.2, 0.2, 0.1, 0.1])
    target_hidden = torch.randn(7, 12, generator=generator)
    wanted = 0.25 * (target_hidden @ head.t()).softmax(-1) + 0.75 * F.one_hot(labels, 33)
    expected = (F.cross_entropy(hidden @ head.t(), wanted, reduction="none") * weights).sum()
    (expected_gradient,) = torch.autograd.grad(3 * expected, hidden)

    loss, candidates = head_loss(hidden, target_hidden, head, labels, weights, 0.25, 5)
    (gradient,) = torch.autograd.grad(3 * loss, hidden)

    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert torch.equal(candidates, (hidden @ head.t()).topk(5).indices)


def test_loss_of_pairs_is_cross_entropy_among_candidates(generator):
    """Some labels are candidates, others take the last place."""
    head = torch.randn(33, 12, generator=generator)
    hidden, target_hidden = torch.randn(2, 7, 12, generator=generator)
    hidden.requires_grad_()
    selector = EmbeddingSelector(head, 4, 5)
    torch.nn.init.normal_(selector.successor.weight, generator=generator)
    before, labels = torch.randint(33, (2, 7), generator=generator)
    candidates = (hidden @ head.t()).topk(5).indices
    labels[:3] = candidates[:3, 2]
    assert (candidates[3:] != labels[3:, None]).all(-1).any()
    weights = torch.tensor([0.3, 0.0, 0.1, 0.2, 0.2, 0.1, 0.1])

    loss = selector_loss(selector, hidden, target_hidden, head, candidates, before, labels, weights, 0.25)
    loss.backward()

    tensors = selector.checkpoint()
    expected = torch.zeros(())
    for row in range(7):
        chosen = candidates[row].tolist()
        if int(labels[row]) not in chosen:
            chosen[-1] = int(labels[row])
        gate = selector.hidden_projection(hidden[row]) * tensors["predecessor_codebook"][before[row]]
        scores = head[chosen] @ hidden[row] + tensors["successor_codebook"][chosen] @ gate
        wanted = 0.25 * (head[chosen] @ target_hidden[row]).softmax(-1)
        wanted[chosen.index(int(labels[row]))] += 0.75
        expected = expected - weights[row] * (wanted * scores.log_softmax(-1)).sum()
    torch.testing.assert_close(loss, expected)
    assert all(p.grad is not None and p.grad.any() for p in (hidden, *selector.parameters()))


def test_tokens_before_labels():
    tokens = torch.arange(10)[None]
    assert tokens_before(tokens, torch.tensor([[1, 5]]), 4).tolist() == [[[1, 2, 3], [5, 6, 7]]]


def test_cut_blocks_draft_as_blocks_of_their_size(generator):
    """Each block of a mixed batch equals the batch-1 forward of a drafter with that block size."""
    config = DRAFTER_CONFIG | SMALL | {"vocab_size": 50}
    drafter = ReferenceDrafter(config)
    initialize(drafter, 0.3)
    embedding = torch.randn(50, 16, generator=generator)
    tokens = torch.randint(50, (2, 60), generator=generator)
    features = torch.randn(2, 60, 64, generator=generator)
    anchors = sorted_anchors(2, 60, 5, generator)
    sizes = random_sizes(anchors, BLOCK_SIZE, 0.6, generator)
    assert sizes.min() >= 2 and len(sizes.unique()) > 3

    mask = block_mask(anchors, sizes, 60, BLOCK_SIZE)
    hidden = run_blocks(drafter, embedding, features, tokens, anchors, mask)

    for row in range(2):
        for i, size in enumerate(sizes[row].tolist()):
            alone = ReferenceDrafter(config | {"block_size": size})
            alone.load_state_dict(drafter.state_dict())
            part = slice(row, row + 1)
            expected = draft_blocks(alone, embedding, features[part], tokens[part], anchors[part, i : i + 1])
            torch.testing.assert_close(hidden[row, i, : size - 1], expected[0, 0], atol=1e-5, rtol=1e-4)


def test_tiles_are_those_that_have_visible_keys(generator):
    length, count = 3 * TILE, 16
    anchors = sorted_anchors(2, length, count, generator)
    anchors[0, :8] = torch.arange(TILE, TILE + 8)
    sizes = torch.full_like(anchors, BLOCK_SIZE)
    num_rows = count * BLOCK_SIZE
    expected = create_block_mask(
        visible_keys(anchors, sizes, length, BLOCK_SIZE), 2, None, num_rows, length + num_rows, "cpu", BLOCK_SIZE=TILE
    )

    lists = tile_lists(anchors, length, BLOCK_SIZE)

    wanted = (expected.kv_num_blocks, expected.kv_indices, expected.full_kv_num_blocks, expected.full_kv_indices)
    for (num, which), (wanted_num, wanted_which) in zip((lists[:2], lists[2:]), (wanted[:2], wanted[2:]), strict=True):
        assert torch.equal(num, wanted_num)
        is_listed = torch.arange(which.shape[-1]) < num[..., None]
        assert torch.equal(which[is_listed], wanted_which[is_listed])


def test_labels_end_where_the_text_leaves_the_greedy_path():
    best = torch.tensor([[9, 1, 2, 3, 4, 5, 6, 7]])
    tokens = best.clone()
    tokens[0, 4] = 8
    is_answer = torch.tensor([[False, True, True, True, True, True, True, False]])
    batch = Batch(tokens, best, is_answer, torch.ones(1))

    labels, counts = greedy_labels(batch, torch.tensor([[1, 2, 4]]), 4)

    states = torch.arange(8.0)[None, :, None]
    assert before_labels(states, torch.tensor([[1, 2, 4]]), 4).flatten().tolist() == [1, 2, 3, 2, 3, 4, 4, 5, 6]
    assert labels.tolist() == [[[2, 3, 4], [3, 4, 5], [5, 6, 7]]]
    assert counts.tolist() == [[[True, True, True], [True, True, False], [True, True, False]]]


@pytest.mark.parametrize("shape", [(3, 20, 50), (2, 50, 20), (1, 16, 16)])
def test_orthogonal_matrices(shape, generator):
    matrices = torch.randn(shape, generator=generator)
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert values.shape == (shape[0], min(shape[1:]))
    assert values.min() > 0.3 and values.max() < 1.3


def test_muon_steps_as_torchs(generator):
    """Matrices have several shapes, some the same. torch's iteration rounds to bf16."""
    start = [torch.randn(shape, generator=generator) for shape in ((8, 24), (24, 8), (8, 24))]
    ours, theirs = ([torch.nn.Parameter(matrix.clone()) for matrix in start] for _ in range(2))
    optimizers = (
        Muon(ours, 0.01, 0.1),
        torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(3):
        gradients = [torch.randn(matrix.shape, generator=generator) for matrix in start]
        for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()

    for before, our, their in zip(start, ours, theirs, strict=True):
        moved, expected = our - before, their - before
        assert expected.abs().max() > 0.01
        assert (moved - expected).norm() < 0.05 * expected.norm()


def test_muon_takes_matrices():
    with pytest.raises(ValueError, match=r"\(4,\)"):
        Muon([torch.nn.Parameter(torch.zeros(4))], 0.01, 0.0)
