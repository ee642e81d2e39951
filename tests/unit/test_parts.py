"""Convolutions and pairs: the oracle, and the tables of the cycle, against stored outputs of z-lab's own library."""

import copy

import pytest
import torch
from support.oracle.decode import drafts_of
from support.oracle.drafter import ReferenceDrafter
from support.oracle.tree import Text, follow_chain
from support.zlab_outputs import CONFIGS, CONTEXT, TEMPERATURE, block_of, fill, inputs, stored

from sglang_dflash.ops.bigrams import TABLE_DTYPE, TABLE_SIZE
from sglang_dflash.ops.reference.block_conv import block_conv
from sglang_dflash.ops.reference.fill_pair_table import fill_pair_table
from sglang_dflash.ops.reference.follow_table import follow_table
from sglang_dflash.types import DrawParameters, PairVectors

STORED = stored()
# The library computes in float32.
TOLERANCE = {"rtol": 0, "atol": 1e-4}
EVERY_CONFIG = pytest.mark.parametrize("name", CONFIGS)


class Case:
    """A tiny drafter with its inputs, in float64."""

    def __init__(self, name: str) -> None:
        config = CONFIGS[name]
        self.drafter = ReferenceDrafter(config).eval()
        fill(self.drafter)
        self.drafter.double()
        self.features, self.embedding, lm_head = (tensor.double() for tensor in inputs(config))
        self.lm_head = torch.nn.Linear(*lm_head.T.shape, bias=False).double()
        self.lm_head.weight.data.copy_(lm_head)
        self.block = block_of(config)

    @torch.no_grad()
    def rows(self) -> torch.Tensor:
        """Return the drafter's rows of the block, [W, H]."""
        context = torch.arange(CONTEXT)[None]
        positions = torch.arange(CONTEXT, CONTEXT + len(self.block))[None, None]
        kv = self.drafter.project_context(self.features, context)
        return self.drafter(self.embedding[self.block][None, None], positions, kv, context)[0, 0]

    @torch.no_grad()
    def path(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the greedy drafts for rows [W - 1, H]."""
        logits = self.drafter.draft_logits(rows, self.lm_head)
        return follow_chain(drafts_of(self.drafter, logits, rows, Text(self.block[:1].tolist()), 1))

    @torch.no_grad()
    def table(self, rows: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return candidates [1, W - 1, K], and the table of their probabilities if all scores are multiplied."""
        selector = self.drafter.candidate_selector
        logits, candidates = self.drafter.draft_logits(rows, self.lm_head).topk(selector.num_candidates)
        factors = selector.hidden_projection(rows)[None, :, None].expand(-1, -1, candidates.shape[1], -1)
        vectors = PairVectors(
            selector.predecessor_codebook.float(), selector.successor_codebook.float(), (factors * scale).float()
        )
        zeros = torch.zeros(1, dtype=torch.int64)
        logits = logits[None].float() * scale
        greedy = DrawParameters.greedy(1, "cpu")
        no_text = torch.zeros(1, TABLE_SIZE, dtype=TABLE_DTYPE)
        table = fill_pair_table(
            self.block[:1], candidates[None], logits, vectors, 99, greedy, zeros, no_text, zeros, zeros, zeros
        )
        return candidates[None], *table


@EVERY_CONFIG
def test_rows(name):
    torch.testing.assert_close(Case(name).rows().float(), STORED[name]["rows"], **TOLERANCE)


@EVERY_CONFIG
def test_greedy_path(name):
    case = Case(name)
    rows = case.rows()[1:]
    assert torch.equal(case.path(rows), STORED[name]["path"])
    candidates, _, ranks = case.table(rows)
    assert torch.equal(candidates[0].sort(dim=-1).values, STORED[name]["candidates"].sort(dim=-1).values)
    block = case.block[None].clone()
    follow_table(candidates, ranks, block)
    assert block[0].tolist() == [int(case.block[0]), *STORED[name]["path"].tolist()]


@EVERY_CONFIG
def test_conditionals(name):
    """A row of the table has what the library draws from, after the draft that it has drawn before."""
    case, outputs = Case(name), STORED[name]
    [candidates], [log_probs], [ranks] = case.table(case.rows()[1:], scale=1 / TEMPERATURE)
    before = 0
    for depth, token in enumerate(outputs["sampled_path"]):
        ours = dict(zip(candidates[depth][ranks[depth, before].long()].tolist(), log_probs[depth, before].exp()))
        theirs = dict(zip(outputs["sampled_candidates"][depth].tolist(), outputs["q"][depth]))
        assert ours.keys() == theirs.keys()
        assert all(abs(ours[candidate] - theirs[candidate]) < 1e-4 for candidate in ours)
        [[before]] = (candidates[depth] == token).nonzero().tolist()


@EVERY_CONFIG
def test_op_is_the_convolution_of_the_oracle(name):
    case = Case(name)
    conv, x = case.drafter.layers[1].attention_conv, torch.randn(2, 6, 32, dtype=torch.float64)
    delta = conv.kernel_projection(x).flatten(0, 1).unflatten(-1, (2, conv.taps, -1))
    for side in (0, 1):
        got = block_conv(x.flatten(0, 1), delta, conv.base_kernel.data, side, rows=6)
        torch.testing.assert_close(got, conv(x, conv.weights(x), side).flatten(0, 1), **TOLERANCE)


# --- errors that these tests must find ------------------------------------------------------------------------------


def scaled(tensor: torch.nn.Parameter, part: tuple) -> None:
    tensor.data[part] *= 2


POISONS = {
    "side before the attention": lambda layer: scaled(layer.attention_conv.base_kernel, (0, 0)),
    "side after the attention": lambda layer: scaled(layer.attention_conv.base_kernel, (1, 0)),
    "side before the MLP": lambda layer: scaled(layer.mlp_conv.base_kernel, (0, 0)),
    "side after the MLP": lambda layer: scaled(layer.mlp_conv.base_kernel, (1, 0)),
    "last tap": lambda layer: scaled(layer.attention_conv.base_kernel, (0, -1)),
    "weights of rows": lambda layer: scaled(layer.mlp_conv.kernel_projection.weight, (0,)),
}


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("layer", [0, 2])
def test_every_weight_counts(poison, layer):
    case = Case("odd sizes")
    POISONS[poison](case.drafter.layers[layer])
    assert (case.rows().float() - STORED["odd sizes"]["rows"]).abs().max() > 1e-2


def test_swapped_codebooks_change_drafts():
    case = Case("odd sizes")
    selector = case.drafter.candidate_selector
    rows, books = case.rows()[1:], (selector.predecessor_codebook, selector.successor_codebook)
    selector.successor_codebook, selector.predecessor_codebook = books
    assert not torch.equal(case.path(rows), STORED["odd sizes"]["path"])


def test_rows_of_the_bonus_token_change_drafts():
    case = Case("odd sizes")
    assert not torch.equal(case.path(case.rows()[:-1]), STORED["odd sizes"]["path"])


@pytest.mark.parametrize("field", ["output_multiplier", "final_logit_softcapping"])
def test_factor_and_cap_change_conditionals(field):
    """They change the logits, not the products, so they matter where pairs are scored."""
    case = Case("odd sizes")
    object.__setattr__(case.drafter.config, field, {"output_multiplier": 1.0}.get(field))
    changed, plain = (Case.table(case, case.rows()[1:])[1] for case in (case, Case("odd sizes")))
    assert (changed - plain).abs().max() > 1e-2


def test_identity(name="published sizes"):
    """Convolutions that change nothing, and vectors of zeros, are the drafter without these parts, bit for bit."""
    case = Case(name)
    plain = copy.deepcopy(case)
    for layer in case.drafter.layers:
        for conv in (layer.attention_conv, layer.mlp_conv):
            conv.base_kernel.data.zero_()[:, 0] = 1
            conv.kernel_projection.weight.data.zero_()
    selector = case.drafter.candidate_selector
    selector.predecessor_codebook.data.zero_()
    for layer in plain.drafter.layers:
        layer.attention_conv = layer.mlp_conv = None
    plain.drafter.candidate_selector = None
    rows = case.rows()
    assert torch.equal(rows, plain.rows())
    assert torch.equal(case.path(rows[1:]), plain.path(rows[1:]))
