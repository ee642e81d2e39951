"""The drafts that the target verifies, as a chain or as a tree, and the tokens it accepts of them.

One drafter forward gives a distribution for every position of a block. A table of it says how probable each draft is
after the draft before. A chain takes the most probable draft each time. A tree takes the N - 1 most probable paths, so
that a second choice is verified where the first is wrong.

A strategy is made once per server. Everything that differs between chains and trees is here: memory, drafts, attention,
acceptance, draft lengths. What is common is in :class:`sglang_dflash.engine.cycle.DecodeCycle`.

Shapes as in :mod:`sglang_dflash.types`: bs requests, B block size, W draft length, N verified tokens, K candidates.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.utils.common import async_h2d

from sglang_dflash import ops
from sglang_dflash.attention.trees import ChainAttentionBackend, TreeAttentionBackend
from sglang_dflash.attention.verify_input import DFlashVerifyInput
from sglang_dflash.draft.bigrams import Bigrams
from sglang_dflash.draft.head import DraftHead
from sglang_dflash.draft.texts import Texts
from sglang_dflash.engine.adaptive.acceptance import AcceptanceModel, ChainAcceptance, TreeAcceptance
from sglang_dflash.engine.backends import build_backend, override_num_draft_tokens
from sglang_dflash.engine.simulate import Simulation
from sglang_dflash.types import Acceptance, Block, Trees
from sglang_dflash.verify.output import Verified

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drafts:
    """Drafts of a cycle, written to the target's batch.

    Attributes:
        block_tokens: [bs, W] int64. The bonus token and the drafts of each request that has a chain. Of trees, the
            first W nodes.
        trees: None: all requests have chains.
        candidates: [bs, W - 1, K] int64. Candidates of each position that the trees were grown from, the most probable
            first; None: chains, or trees of a root alone.
    """

    block_tokens: torch.Tensor
    trees: Trees | None = None
    candidates: torch.Tensor | None = None


class Verification(ABC):
    """Strategy of a server: chains or trees.

    Attributes:
        num_tokens: N of batches of any size.
        max_tokens: the largest N, of small batches.
    """

    def __init__(
        self,
        target_runner: ModelRunner,
        num_tokens: int,
        max_tokens: int,
        block_size: int,
        simulation: Simulation,
        bigrams: Bigrams,
        texts: Texts | None,
    ) -> None:
        """
        Args:
            target_runner: the target's, with its attention backend.
            num_tokens, max_tokens: see the class.
            block_size: B.
            simulation: replaces what is drafted and accepted, for benchmarks.
            bigrams: pairs of tokens in the texts of all running requests.
            texts: of all running requests. None: nothing is copied from them.
        """
        self.num_tokens, self.max_tokens = num_tokens, max_tokens
        self._target_runner, self._block_size, self._simulation = target_runner, block_size, simulation
        self._bigrams, self._texts = bigrams, texts

    # --- memory and attention -----------------------------------------------------------------------------------------

    @abstractmethod
    def block_rows(self, rows: Sequence[torch.Tensor], num_tokens: int) -> Sequence[torch.Tensor]:
        """Return memory for the drafter's blocks.

        Args:
            rows: three int64 tensors of the verified tokens: tokens, positions, KV slots.
            num_tokens: bs * W, tokens of all blocks.

        Returns:
            The same three of the blocks.
        """

    @abstractmethod
    def target_backends(self) -> tuple[AttentionBackend, ...]:
        """Return the target's own attention backends that verify."""

    @abstractmethod
    def graph_backend(self, num_tokens: int) -> AttentionBackend | None:
        """Return the target's attention for graphs of N = `num_tokens`; None: its own backend."""

    @contextmanager
    def attending_eagerly(self) -> Iterator[None]:
        """Give the target the attention that verifies without a graph. For chains it has its own."""
        yield

    # --- one cycle, in the order of its steps -------------------------------------------------------------------------

    def chains(self, fallback: list[int], bs: int, device: torch.device) -> torch.Tensor | None:
        """Return which requests get a chain without noise: those that need SGLang's sampler.

        Args:
            fallback: their indices.

        Returns:
            [bs] int64, 1 for these; None: there are none.
        """
        if not fallback:
            return None
        indices = set(fallback)
        return async_h2d([i in indices for i in range(bs)], dtype=torch.int64, device=device)

    @abstractmethod
    def place_roots(self, positions: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Write positions from which SGLang derives mRoPE's.

        Args:
            positions: [bs * N] int64 of the verified tokens.
            seq_lens: [bs] int64.
        """

    def block_batch(self, batch: ForwardBatch, block: Block, draft_runner: ModelRunner) -> ForwardBatch:
        """Return the drafter's batch: `batch` with the tokens of `block`."""
        blocks = replace(
            batch,
            input_ids=block.input_ids,
            positions=block.positions,
            out_cache_loc=block.out_cache_loc,
            spec_info=DFlashVerifyInput(
                draft_token=block.input_ids,
                positions=block.positions,
                draft_token_num=block.input_ids.shape[0] // batch.batch_size,
                capture_hidden_mode=batch.spec_info.capture_hidden_mode,
            ),
        )
        draft_runner.kv_index_translator.bind_runner_slots(blocks)
        return blocks

    @abstractmethod
    def draft_root(self, batch: ForwardBatch, block: Block) -> Drafts:
        """Have the bonus token alone verified, W = N = 1."""

    @abstractmethod
    def draft(self, head: DraftHead, hidden_states: torch.Tensor, batch: ForwardBatch, block: Block) -> Drafts:
        """Write drafts to the target's batch.

        Args:
            head: the drafter's lm_head.
            hidden_states: [bs * rows, H] of the drafter.
            batch: the target's.
            block: the same requests.
        """

    @abstractmethod
    def accept(
        self,
        batch: ForwardBatch,
        block: Block,
        drafts: Drafts,
        output: LogitsProcessorOutput,
        target_tokens: torch.Tensor,
    ) -> Verified:
        """Accept the drafts that agree with the target, of all requests.

        Args:
            batch: the target's.
            block: the same requests.
            drafts: as they were verified.
            output: the target's, with its hidden states.
            target_tokens: [bs * N] int64. The target's choice after each verified token.
        """

    def accept_chains(
        self,
        block_tokens: torch.Tensor,
        target_tokens: torch.Tensor,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
        is_undecided: torch.Tensor | None = None,
    ) -> Acceptance:
        """Accept a prefix of each chain, and add it to the request's text.

        Args:
            block_tokens: [n, W] int64.
            target_tokens: n * W int64 of any shape. The target's choice after each token.
            seq_lens: [n] int64.
            req_pool_indices: [n] int64.
            is_undecided: [n] int64. 1 for requests whose tokens SGLang's sampler chooses later. None: there are none.
        """
        accepted = ops.accept_prefix(block_tokens, target_tokens.view_as(block_tokens), seq_lens)
        accepted = self._simulation.accept(accepted, block_tokens, seq_lens)
        self._bigrams.add(req_pool_indices, block_tokens[:, 0], accepted, is_undecided, self._texts, seq_lens)
        return accepted

    @abstractmethod
    def context_slots(self, batch: ForwardBatch, block: Block, draft_runner: ModelRunner) -> torch.Tensor:
        """Return slots in the drafter's KV pool, [bs * W] int64, for `Verified.hidden_states`."""

    # --- adaptive draft length ----------------------------------------------------------------------------------------

    @abstractmethod
    def acceptance_model(self, cycles_per_update: int) -> AcceptanceModel:
        """Return a model that knows nothing yet."""


class ChainVerification(Verification):
    """One chain of drafts per request, N = W. The drafter's block is in the memory of the verified tokens."""

    def __init__(
        self,
        target_runner: ModelRunner,
        block_size: int,
        simulation: Simulation,
        bigrams: Bigrams,
        attention: ChainAttentionBackend | None,
    ) -> None:
        """
        Args:
            target_runner, block_size, simulation, bigrams: see :class:`Verification`.
            attention: in graphs, instead of the target's own; None: the target's own.
        """
        super().__init__(target_runner, block_size, block_size, block_size, simulation, bigrams, texts=None)
        self._attention = attention
        self._path = torch.arange(block_size, device=target_runner.device)[None]

    def block_rows(self, rows: Sequence[torch.Tensor], num_tokens: int) -> Sequence[torch.Tensor]:
        return rows

    def target_backends(self) -> tuple[AttentionBackend, ...]:
        return (self._target_runner.attn_backend,)

    def graph_backend(self, num_tokens: int) -> AttentionBackend | None:
        if self._attention is not None or num_tokens == self.num_tokens:
            return self._attention
        return build_backend(self._target_runner, num_tokens)

    def place_roots(self, positions: torch.Tensor, seq_lens: torch.Tensor) -> None:
        # The block's own positions are there.
        pass

    def block_batch(self, batch: ForwardBatch, block: Block, draft_runner: ModelRunner) -> ForwardBatch:
        if block.input_ids.shape == batch.input_ids.shape:
            # What the target verifies is the drafter's block.
            return batch
        return super().block_batch(batch, block, draft_runner)

    def draft_root(self, batch: ForwardBatch, block: Block) -> Drafts:
        return Drafts(block.input_ids.view(batch.batch_size, -1))

    def draft(self, head: DraftHead, hidden_states: torch.Tensor, batch: ForwardBatch, block: Block) -> Drafts:
        block_tokens = block.input_ids.view(batch.batch_size, -1)
        candidates, _, ranks = head.table(hidden_states, block, self._bigrams.tables)
        ops.follow_table(candidates, ranks, block_tokens)
        return Drafts(block_tokens)

    def accept(
        self,
        batch: ForwardBatch,
        block: Block,
        drafts: Drafts,
        output: LogitsProcessorOutput,
        target_tokens: torch.Tensor,
    ) -> Verified:
        block_tokens = batch.input_ids.view(batch.batch_size, -1)
        accepted = self.accept_chains(
            block_tokens, target_tokens, batch.seq_lens, batch.req_pool_indices, is_undecided=block.is_chain
        )
        paths = self._path[:, : block_tokens.shape[1]].expand(batch.batch_size, -1)
        return Verified(accepted, output.hidden_states, paths)

    def context_slots(self, batch: ForwardBatch, block: Block, draft_runner: ModelRunner) -> torch.Tensor:
        return batch.kv_loc_plan.write_ids(draft_runner.kv_index_translator)

    def acceptance_model(self, cycles_per_update: int) -> AcceptanceModel:
        return ChainAcceptance(self.num_tokens, cycles_per_update)


@cache
def _log_chains() -> None:
    logger.info(
        "Requests that need SGLang's sampler (those with grammars, penalties, min_new_tokens, biases, processors, log "
        "probabilities, seeds or all three filters) are verified in chains, not in trees."
    )


class TreeVerification(Verification):
    """One tree of drafts per request, N >= W nodes. No path is longer than W.

    A request that needs SGLang's sampler has a chain in its place: what is applied to the logits of a token depends on
    the tokens before it.
    """

    def __init__(
        self,
        target_runner: ModelRunner,
        num_tokens: int,
        max_tokens: int,
        block_size: int,
        simulation: Simulation,
        bigrams: Bigrams,
        attention: TreeAttentionBackend,
        num_candidates: int,
        texts: Texts,
        counts_accepted: bool,
    ) -> None:
        """
        Args:
            target_runner, num_tokens, max_tokens, block_size, simulation, bigrams, texts: see :class:`Verification`.
            attention: of the target's layers with KV.
            num_candidates: K.
            counts_accepted: fill `Verified.tree_counts`.
        """
        super().__init__(target_runner, num_tokens, max_tokens, block_size, simulation, bigrams, texts)
        self._attention, self._eager_backend = attention, attention.of_target()
        self._num_candidates = num_candidates
        # By the nodes of a tree: see `Verified.tree_counts`. CUDA graphs hold its address.
        self._counts = None
        if counts_accepted:
            shape = (max_tokens + 1, max_tokens + num_candidates)
            self._counts = torch.zeros(shape, dtype=torch.int64, device=target_runner.device)

    def block_rows(self, rows: Sequence[torch.Tensor], num_tokens: int) -> Sequence[torch.Tensor]:
        # Trees are written when the drafter has run.
        return [torch.zeros_like(tensor[:num_tokens]) for tensor in rows]

    def target_backends(self) -> tuple[AttentionBackend, ...]:
        return ()

    def graph_backend(self, num_tokens: int) -> AttentionBackend:
        with override_num_draft_tokens(num_tokens):
            return self._attention.of_target()

    @contextmanager
    def attending_eagerly(self) -> Iterator[None]:
        runner = self._target_runner
        original, runner.attn_backend = runner.attn_backend, self._eager_backend
        try:
            yield
        finally:
            runner.attn_backend = original

    def chains(self, fallback: list[int], bs: int, device: torch.device) -> torch.Tensor | None:
        if fallback:
            _log_chains()
        return super().chains(fallback, bs, device)

    def place_roots(self, positions: torch.Tensor, seq_lens: torch.Tensor) -> None:
        # All nodes begin where the root is. `draft` adds their depths.
        positions.view(len(seq_lens), -1).copy_(seq_lens[:, None])

    def draft_root(self, batch: ForwardBatch, block: Block) -> Drafts:
        trees = self._trees(batch)
        for verified, drafted in zip((trees.tokens, trees.positions, trees.out_cache_loc), block.rows, strict=True):
            verified.copy_(drafted)
        trees.parents.fill_(-1)
        trees.ancestors.fill_(1)
        return Drafts(block.input_ids.view(batch.batch_size, -1), trees)

    def draft(self, head: DraftHead, hidden_states: torch.Tensor, batch: ForwardBatch, block: Block) -> Drafts:
        bs, trees = batch.batch_size, self._trees(batch)
        block_tokens = block.input_ids.view(bs, -1)
        candidates, log_probs, ranks = head.table(hidden_states, block, self._bigrams.tables, self._texts.tokens)
        ops.grow_trees(
            block_tokens[:, 0],
            candidates,
            log_probs,
            ranks,
            block.is_chain,
            batch.seq_lens,
            batch.req_pool_indices,
            self._attention.req_to_token,
            trees,
        )
        if batch.mrope_positions is not None:
            depths = batch.positions.view(bs, -1) - batch.seq_lens[:, None]
            batch.mrope_positions += depths.view(-1)
        return Drafts(trees.tokens.view(bs, -1)[:, : block_tokens.shape[1]], trees, candidates)

    def _trees(self, batch: ForwardBatch) -> Trees:
        """Return trees in the memory of the target's batch."""
        parents, ancestors = batch.input_ids.new_empty((2, *batch.input_ids.view(batch.batch_size, -1).shape))
        trees = Trees(batch.input_ids, batch.positions, batch.out_cache_loc, parents, ancestors)
        # SGLang's attention layers hand their backend nothing but the batch.
        batch.spec_info.trees = trees
        return trees

    def accept(
        self,
        batch: ForwardBatch,
        block: Block,
        drafts: Drafts,
        output: LogitsProcessorOutput,
        target_tokens: torch.Tensor,
    ) -> Verified:
        bs, trees = batch.batch_size, drafts.trees
        draft_length = block.input_ids.shape[0] // bs
        tokens, slots = (rows.view(bs, -1) for rows in (trees.tokens, trees.out_cache_loc))
        target_tokens = target_tokens.view(bs, -1)
        accepted, paths = ops.accept_paths(tokens, trees.parents, target_tokens, batch.seq_lens, draft_length)
        accepted = self._simulation.accept(accepted, tokens[:, :draft_length], batch.seq_lens)
        self._simulation.set_paths(paths)
        # Chains are decided later: see `accept_chains`.
        requests = (batch.req_pool_indices, tokens[:, 0], accepted, block.is_chain)
        self._bigrams.add(*requests, self._texts, batch.seq_lens)
        self._attention.move_kv(slots, paths, accepted.accept_lens)
        rows = paths + torch.arange(0, slots.numel(), slots.shape[1], device=paths.device)[:, None]
        counts = None
        if self._counts is not None:
            num_nodes = tokens.shape[1]
            counts = self._counts[num_nodes, : num_nodes + self._num_candidates]
            ops.count_paths(
                counts,
                paths,
                accepted.accept_lens,
                tokens,
                drafts.candidates,
                block.is_chain,
                batch.req_pool_indices,
            )
        return Verified(accepted, output.hidden_states[rows.view(-1)], paths, counts)

    def context_slots(self, batch: ForwardBatch, block: Block, draft_runner: ModelRunner) -> torch.Tensor:
        return block.out_cache_loc

    def acceptance_model(self, cycles_per_update: int) -> AcceptanceModel:
        return TreeAcceptance(self.max_tokens, self._block_size, cycles_per_update)
