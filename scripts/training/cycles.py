"""Committed tokens of the cycles over a text that the target wrote alone, for chains and for trees.

A draft is accepted if the target chooses the same token, greedily or by sampling. So the text determines what every
cycle would have committed. Sampled texts are drawn by noise that is kept (:mod:`sglang_dflash.ops.noise`), as a server
draws them, and drafts are chosen by the same noise.

Letters in shapes: M blocks, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from support.oracle.drafter import ReferenceDrafter
from torch import Tensor

from sglang_dflash import ops
from sglang_dflash.ops.bigrams import tables_of
from sglang_dflash.ops.copies import TEXT_DTYPE
from sglang_dflash.types import DrawParameters, PairVectors, Trees


@dataclass(frozen=True)
class DraftKind:
    """A way to draft.

    Attributes:
        num_nodes: nodes of a tree, with the root; None: a chain.
        num_candidates: candidates per depth, at most 16. With one, neither the text nor the noise can change a chain.
        has_noise: add the noise of the target's draws to the drafter's scores. Greedy texts have none.
        has_copies: what followed the end of the text before is one more path.
    """

    num_nodes: int | None
    num_candidates: int
    has_noise: bool
    has_copies: bool = True

    @property
    def name(self) -> str:
        if self.num_candidates == 1:
            return "chain of the best tokens"
        shape = "chain" if self.num_nodes is None else f"tree of {self.num_nodes}"
        without = ("" if self.has_noise else ", without noise") + ("" if self.has_copies else ", without copies")
        return f"{shape}, {self.num_candidates} candidates{without}"


# What a server verifies without trees. Chains copy nothing.
CHAIN = DraftKind(None, 16, has_noise=True)


def draft_kinds(sizes: Sequence[int], is_sampled: bool) -> list[DraftKind]:
    """Return the kinds to measure: chains of the best tokens, chains and trees of 8 and 16 candidates, and no copies.

    Args:
        sizes: of the trees.
        is_sampled: measure each without noise, too.
    """
    noises = (False, True) if is_sampled else (True,)
    kinds = [DraftKind(size, k, has_noise) for size in (None, *sizes) for k in (8, 16) for has_noise in noises]
    drafted = [DraftKind(size, 16, has_noise=True, has_copies=False) for size in sizes]
    return [replace(CHAIN, num_candidates=1), *kinds, *drafted]


@dataclass(frozen=True)
class Draws:
    """How the target chooses the tokens of n texts.

    Attributes:
        parameters: of the texts.
        keys: [n] int64. Keys of their noise.
    """

    parameters: DrawParameters
    keys: Tensor

    @classmethod
    def of(cls, keys: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> "Draws":
        """Return draws that filter alike.

        Args:
            keys: [n] int64.
            temperature: 0 is greedy.
            top_k, top_p: 0 and 1 filter nothing.
        """
        parameters = DrawParameters.greedy(len(keys), keys.device)
        if temperature > 0:
            parameters.temperatures.fill_(temperature)
            parameters.top_ks.fill_(top_k or 2**30)
            parameters.top_ps.fill_(top_p)
        return cls(parameters, keys)

    def take(self, index: Tensor) -> "Draws":
        """Return the draws of some texts: [m] integers."""
        return Draws(DrawParameters(*(values[index] for values in vars(self.parameters).values())), self.keys[index])

    def choose(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Return the next token of each text, [n] int64.

        Args:
            logits: [n, V].
            positions: [n] int64. Position of the last token.
        """
        maxima, tokens = ops.row_max(logits)
        # The kernel reads positions side by side. An expanded tensor has one.
        ops.sample_rows(logits, maxima, tokens, self.parameters, self.keys, positions.contiguous())
        return tokens


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of the target; `temperature` 0 is greedy."""

    name: str
    temperature: float
    top_p: float = 1.0
    top_k: int = 0

    def draws(self, keys: Tensor) -> Draws:
        """Return how texts of these keys, [n] int64, are drawn."""
        return Draws.of(keys, self.temperature, self.top_k, self.top_p)


SAMPLINGS = (
    Sampling("greedy", 0.0),
    Sampling("t0.6_top_p0.95_top_k20", 0.6, 0.95, 20),
    Sampling("t0.7", 0.7),
    Sampling("t1", 1.0),
)


def num_correct(
    logits: Tensor,
    labels: Tensor,
    texts: Tensor,
    lens: Tensor,
    draws: Draws,
    kinds: Sequence[DraftKind],
    vectors: PairVectors | None = None,
) -> Tensor:
    """Return the number of the text's tokens that are drafted in each block, from the first on.

    Args:
        logits: [M, W - 1, V]. The drafter's.
        labels: [M, W - 1] int64. The tokens that the target wrote; -1 after the text's end.
        texts: [M, T] int64. The text before each block, and the block's first token.
        lens: [M] int64. Lengths of those texts.
        draws: of the M blocks' texts.
        kinds: ways to draft.
        vectors: of a drafter that scores pairs, with gates [M, W - 1, 1, r]. None: it has none.

    Returns:
        [len(kinds), M] int64.
    """
    num_blocks, depths, _ = logits.shape
    values, columns, log_sums = ops.top_columns(logits.flatten(0, 1), max(kind.num_candidates for kind in kinds))
    columns, values = (best.view(num_blocks, depths, -1) for best in (columns, values))
    log_sums = log_sums.view(num_blocks, depths)
    # With an empty context the position of a node is its depth.
    zeros = torch.zeros(num_blocks, dtype=torch.int64, device=logits.device)
    own_rows, bigrams = torch.arange(num_blocks, device=logits.device), tables_of(texts, lens)
    bonus_tokens = texts.gather(1, lens[:, None] - 1)[:, 0]
    # As a server keeps them: of a power of two.
    kept = F.pad(texts.to(TEXT_DTYPE), (0, (1 << (texts.shape[1] - 1).bit_length()) - texts.shape[1]))
    # No token follows the last depth.
    labels = F.pad(labels, (0, 1), value=-1)
    greedy = DrawParameters.greedy(num_blocks, logits.device)
    found = []
    for kind in kinds:
        if kind.num_candidates == 1:
            found.append((columns[..., 0] == labels[:, :-1]).long().cumprod(dim=1).sum(dim=1))
            continue
        candidates, best = (
            x[..., : kind.num_candidates].clone(memory_format=torch.contiguous_format) for x in (columns, values)
        )
        copies = ()
        if kind.has_copies and kind.num_nodes is not None:
            copies = ops.place_copies(kept, own_rows, lens - 1, zeros, candidates, best)
        parameters = draws.parameters if kind.has_noise else greedy
        of_requests = (parameters, draws.keys, bigrams, zeros, lens - 1, own_rows)
        if vectors is None:
            table = ops.fill_table(candidates, best, log_sums, *of_requests, *copies)
        else:
            k = kind.num_candidates
            gated = replace(vectors, gates=vectors.gates.expand(-1, -1, k, -1))
            table = ops.fill_pair_table(bonus_tokens, candidates, best, gated, k, *of_requests, *copies)
        if kind.num_nodes is None:
            chains = torch.empty_like(labels)
            ops.follow_table(candidates, table[1], chains)
            found.append((chains[:, 1:] == labels[:, :-1]).long().cumprod(dim=1).sum(dim=1))
            continue
        trees = Trees.empty(num_blocks, kind.num_nodes, logits.device)
        slots = torch.zeros((num_blocks, kind.num_nodes), dtype=torch.int32, device=logits.device)
        ops.grow_trees(zeros, candidates, *table, zeros, zeros, own_rows, slots, trees)
        tokens, node_depths = (rows.view(num_blocks, kind.num_nodes) for rows in (trees.tokens, trees.positions))
        accepted, _ = ops.accept_paths(tokens, trees.parents, labels.gather(1, node_depths), zeros, depths + 1)
        found.append(accepted.accept_lens.to(torch.int64) - 1)
    return torch.stack(found)


def pair_vectors(drafter: ReferenceDrafter, hidden: Tensor) -> PairVectors | None:
    """Return what scores of pairs are made of, for `num_correct`; None: the drafter has no selector.

    Args:
        drafter: the drafter.
        hidden: [M, W - 1, H]. Its hidden states.
    """
    selector = drafter.candidate_selector
    if selector is None:
        return None
    gates = selector.hidden_projection(hidden.float())[:, :, None]
    return PairVectors(selector.predecessor_codebook, selector.successor_codebook, gates)


def gains(cycles: dict[str, Tensor], kinds: Sequence[DraftKind]) -> dict[str, tuple[float, float]]:
    """Return what noise, copies and candidates give, with standard errors of the prompts' pairs.

    Args:
        cycles: [prompts] by the names of `kinds`.

    Returns:
        Tokens per cycle over those without noise, without copies, of 8 candidates, of 8 without noise, or of the best
        tokens.
    """
    found = {}
    for kind in kinds:
        if not kind.has_copies:
            continue
        others = {"without noise": replace(kind, has_noise=False), "without copies": replace(kind, has_copies=False)}
        if kind.num_candidates > 8:
            others["of 8"] = replace(kind, num_candidates=8)
            if kind.has_noise:
                others["of 8 without noise"] = replace(kind, num_candidates=8, has_noise=False)
        if kind.num_nodes is None:
            others["of the best tokens"] = replace(kind, num_candidates=1)
        for name, other in others.items():
            if other.name in cycles and other.name != kind.name:
                found[f"{kind.name}, over one {name}"] = ratio(cycles[other.name], cycles[kind.name])
    return found


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
