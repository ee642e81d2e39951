"""States after accepted paths of verified trees or chains equal the states after the same tokens one by one."""

import pytest
import torch
from support.random_trees import ancestors_of, chain_parents

from sglang_dflash.ops.reference import delta_rule
from sglang_dflash.ops.reference.commit_state import commit_state
from sglang_dflash.ops.reference.verify_block import verify_block
from sglang_dflash.types import BlockInputs, States, StateSlots

LAYERS, BLOCK, HEADS, VALUE_HEADS, KEY_SIZE, VALUE_SIZE, CHANNELS = 2, 6, 2, 4, 5, 3, 7
INTERVAL = 16
# Parents of a chain, and of a tree whose path is not where a chain would be; and that path.
CHAIN, CHAIN_PATH = chain_parents(1, BLOCK)[0].tolist(), list(range(BLOCK))
TREE, TREE_PATH = [-1, 0, 0, 2, 1, 3, 5, 5, 7, -1], [0, 2, 3, 5, 7, 8]


class Case:
    """Requests with a past, one for each accepted length, and one row of padding. Row i has slot 2 * i."""

    def __init__(self, num_requests=BLOCK, parents=CHAIN, path=CHAIN_PATH):
        generator = torch.Generator().manual_seed(0)

        def random(*shape):
            return torch.randn(shape, generator=generator)

        self.path = path
        rows, num_nodes = num_requests + 1, len(parents)
        # The padding may be anywhere.
        self.slots = (torch.arange(rows, dtype=torch.int32) * 2).roll(1)
        num_slots = 2 * rows
        self.states = States(
            random(LAYERS, num_slots, CHANNELS, 3), random(LAYERS, num_slots, VALUE_HEADS, VALUE_SIZE, KEY_SIZE)
        )
        self.before = States(self.states.conv.clone(), self.states.temporal.clone())
        sizes = ((CHANNELS,), (HEADS, KEY_SIZE), (VALUE_HEADS, VALUE_SIZE), (VALUE_HEADS,))
        self.inputs = BlockInputs(*(torch.full((LAYERS, rows + 1, num_nodes + 1, *size), torch.nan) for size in sizes))
        self.q, self.k, self.v, self.a, self.b = (
            random(LAYERS, rows, num_nodes, *size)
            for size in (
                (HEADS, KEY_SIZE),
                (HEADS, KEY_SIZE),
                (VALUE_HEADS, VALUE_SIZE),
                (VALUE_HEADS,),
                (VALUE_HEADS,),
            )
        )
        self.a_log, self.dt_bias = random(VALUE_HEADS), random(VALUE_HEADS)
        self.conv_inputs = random(LAYERS, rows, num_nodes, CHANNELS)
        self.inputs.conv[:, :rows, :num_nodes] = self.conv_inputs
        ancestors = ancestors_of(torch.tensor([parents])).expand(rows, -1)
        self.output = torch.stack(
            [
                verify_block(
                    *(x[layer] for x in (self.q, self.k, self.v, self.a, self.b)),
                    self.a_log,
                    self.dt_bias,
                    self.states.temporal[layer],
                    self.slots,
                    ancestors,
                    *(x[layer] for x in (self.inputs.key, self.inputs.change, self.inputs.log_decay)),
                )
                for layer in range(LAYERS)
            ]
        )

    def after(self, row, num_tokens):
        """Return a row's states after `num_tokens` tokens of its path, one by one, and the output of the last one."""
        state = self.before.temporal[:, self.slots[row]]
        output = None
        for t in self.path[:num_tokens]:
            log_decay, beta = delta_rule.gates(self.a_log, self.a[:, row, t], self.dt_bias, self.b[:, row, t])
            key = delta_rule.normalize(self.k[:, row, t], VALUE_HEADS)
            state = delta_rule.update(state, key, self.v[:, row, t], log_decay, beta)
            output = delta_rule.read(state, delta_rule.normalize(self.q[:, row, t], VALUE_HEADS))
        inputs = self.conv_inputs[:, row, self.path[:num_tokens]].transpose(1, 2)
        return state, output, torch.cat([self.before.conv[:, self.slots[row]], inputs], dim=2)[..., -3:]

    def commit(self, accept_lens, seq_lens, kept=None, is_due=1):
        rows = torch.arange(len(self.slots))
        # Which of the two kept slots comes next follows from the boundary.
        slots = StateSlots(self.slots, kept, torch.zeros_like(self.slots))
        commit_state(
            self.states,
            self.inputs,
            slots,
            rows,
            torch.tensor(seq_lens),
            torch.tensor(accept_lens),
            INTERVAL,
            torch.tensor([is_due]),
            torch.tensor([self.path]).expand(len(rows), -1),
        )


@pytest.mark.parametrize(
    ("parents", "path"),
    [(CHAIN, CHAIN_PATH), (CHAIN[:4], CHAIN_PATH[:4]), (TREE, TREE_PATH)],
    ids=["chain", "short chain", "tree"],
)
def test_every_accepted_length(parents, path):
    case = Case(parents=parents, path=path)
    rows = len(case.slots)
    accept_lens = [1 + row % len(path) for row in range(rows)]

    case.commit(accept_lens, [100] * rows)

    for row, slot in enumerate(case.slots.tolist()):
        for t, node in enumerate(path):
            torch.testing.assert_close(case.output[:, row, node], case.after(row, t + 1)[1])
        if slot:
            temporal, _, conv = case.after(row, accept_lens[row])
            torch.testing.assert_close(case.states.temporal[:, slot], temporal)
            assert torch.equal(case.states.conv[:, slot], conv)
    others = sorted({*range(case.states.conv.shape[1])} - set(case.slots.tolist()) | {0})
    assert torch.equal(case.states.conv[:, others], case.before.conv[:, others])
    assert torch.equal(case.states.temporal[:, others], case.before.temporal[:, others])


@pytest.mark.parametrize(("parents", "path"), [(CHAIN, CHAIN_PATH), (TREE, TREE_PATH)], ids=["chain", "tree"])
@pytest.mark.parametrize("num_boundaries", [3, 4])
@pytest.mark.parametrize("offset", range(-BLOCK, 2))
def test_the_state_at_a_boundary_is_kept(offset, num_boundaries, parents, path):
    """Paths end before the boundary, at it or after it, or begin at it. Some requests have no slot for the state."""
    case = Case(parents=parents, path=path)
    rows = len(case.slots)
    accept_lens = [1 + row % BLOCK for row in range(rows)]
    seq_len = num_boundaries * INTERVAL + offset
    kept = torch.zeros(rows, 2, dtype=torch.int64)
    kept[:, num_boundaries % 2] = torch.where(torch.arange(rows) % 3 > 0, case.slots + 1, 0)
    kept_before = case.states.temporal[:, 1::2].clone()

    case.commit(accept_lens, [seq_len] * rows, kept)

    for row, slot in enumerate(case.slots.tolist()):
        if not slot:
            continue
        torch.testing.assert_close(case.states.temporal[:, slot], case.after(row, accept_lens[row])[0])
        step = next((t for t in range(1, accept_lens[row] + 1) if (seq_len + t) % INTERVAL == 0), None)
        temporal = case.states.temporal[:, slot + 1]
        if step is None or row % 3 == 0:
            assert torch.equal(temporal, kept_before[:, slot // 2])
        else:
            kept_temporal, _, kept_conv = case.after(row, step)
            torch.testing.assert_close(temporal, kept_temporal)
            assert torch.equal(case.states.conv[:, slot + 1], kept_conv)


def test_a_batch_of_padding():
    case = Case(num_requests=0)
    case.commit([1], [0])
    assert torch.equal(case.states.temporal, case.before.temporal)


def test_states_that_are_not_due():
    case = Case()
    rows = len(case.slots)
    case.commit([2] * rows, [15] * rows, case.slots.long()[:, None] + 1, is_due=0)
    assert torch.equal(case.states.temporal, case.before.temporal)
    assert torch.equal(case.states.conv, case.before.conv)
