"""The decode cycle that verifies trees of drafts, `--speculative-eagle-topk` of them above 1.

One drafter forward gives a distribution for every token of a block. A chain uses the best token of each; a tree has the
N - 1 most probable beginnings of a block, so that a second choice is verified where the first is wrong. A request whose
tokens the cycle does not choose (`FallbackSampler.needs_fallback`) has a chain in place of its tree, as what is applied
to its logits depends on the tokens before each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash import ops
from sglang_dflash.attention.trees import TreeAttentionBackend
from sglang_dflash.draft.bigrams import Bigrams
from sglang_dflash.engine.cycle import DecodeCycle, Forwards, Settled, Step
from sglang_dflash.engine.relay import DFlashVerifyInput
from sglang_dflash.types import Block, Trees
from sglang_dflash.verify.acceptance import Acceptance


class TreeCycle(DecodeCycle):
    """Of each request, `batch` has N rows, and `block` the W of the drafter's forward. No path has more nodes than W,
    which is not more than N."""

    verifies_trees = True

    def __init__(
        self,
        *args,
        num_nodes: int,
        num_candidates: int,
        bigrams: Bigrams,
        counts_accepted: bool,
        attention: TreeAttentionBackend,
    ) -> None:
        """
        Args:
            num_nodes: N, at most.
            num_candidates: of a row of the drafter, that may be in a tree.
            bigrams: of all running requests, as of their last cycles or prefills.
            counts_accepted: whether somebody asks for `Settled.tree_counts`.
            attention: of the target's forwards.
            args: as those of `DecodeCycle`.
        """
        super().__init__(*args)
        self.num_rows, self._num_candidates = num_nodes, num_candidates
        self._bigrams = bigrams
        self._attention = attention
        # By the nodes of a tree: see `Settled.tree_counts`. CUDA graphs hold its address.
        self._counts = None
        if counts_accepted:
            shape = (num_nodes + 1, num_nodes + num_candidates)
            self._counts = torch.zeros(shape, dtype=torch.int64, device=self.draft_runner.device)

    def begin_verification(self, target_runner: ModelRunner) -> None:
        self._target_runner, self._backend = target_runner, self._attention.of_target()

    def verify_backend(self) -> AttentionBackend:
        return self._attention.of_target()

    @contextmanager
    def verifying_eagerly(self) -> Iterator[None]:
        runner = self._target_runner
        original, runner.attn_backend = runner.attn_backend, self._backend
        try:
            yield
        finally:
            runner.attn_backend = original

    def draft_batch(self, batch: ForwardBatch, block: Block) -> ForwardBatch:
        width = block.input_ids.shape[0] // batch.batch_size
        spec_info = DFlashVerifyInput(
            draft_token=block.input_ids,
            positions=block.positions,
            draft_token_num=width,
            capture_hidden_mode=batch.spec_info.capture_hidden_mode,
        )
        blocks = replace(
            super().draft_batch(batch, block),
            input_ids=block.input_ids,
            positions=block.positions,
            out_cache_loc=block.out_cache_loc,
            spec_info=spec_info,
        )
        self.draft_runner.kv_index_translator.bind_runner_slots(blocks)
        return blocks

    def _draft(self, batch: ForwardBatch, block: Block, forwards: Forwards) -> torch.Tensor:
        bs = batch.batch_size
        parents, ancestors = batch.input_ids.new_empty((2, *batch.input_ids.view(bs, -1).shape))
        trees = Trees(batch.input_ids, batch.positions, batch.out_cache_loc, parents, ancestors)
        batch.spec_info.trees = trees
        block_tokens = block.input_ids.view(bs, -1)
        if block_tokens.shape[1] == 1:
            # A root alone.
            for mine, given in zip((trees.tokens, trees.positions, trees.out_cache_loc), block.rows, strict=True):
                mine.copy_(given)
            trees.parents.fill_(-1)
            trees.ancestors.fill_(1)
            return block_tokens
        candidates = self._head.candidates(self._forward_draft(batch, block, forwards), bs)
        batch.spec_info.candidates = candidates[0]
        ops.grow_trees(
            block_tokens[:, 0],
            *candidates,
            self._bigrams.tables,
            block.is_chain,
            batch.seq_lens,
            batch.req_pool_indices,
            self._attention.req_to_token,
            trees,
        )
        if batch.mrope_positions is not None:
            # So far all nodes are where the root is.
            depths = batch.positions.view(bs, -1) - batch.seq_lens[:, None]
            batch.mrope_positions += depths.view(-1)
        return trees.tokens.view(bs, -1)[:, : block_tokens.shape[1]]

    def _settle(
        self, batch: ForwardBatch, block: Block, output: LogitsProcessorOutput, target_tokens: torch.Tensor
    ) -> Settled:
        bs, trees = batch.batch_size, batch.spec_info.trees
        max_len = block.input_ids.shape[0] // bs
        tokens, slots = (rows.view(bs, -1) for rows in (trees.tokens, trees.out_cache_loc))
        target_tokens = target_tokens.view(bs, -1)
        accepted, paths = ops.accept_paths(tokens, trees.parents, target_tokens, batch.seq_lens, max_len)
        if self._simulated is not None:
            accepted = self._simulated(accepted, tokens[:, :max_len], batch.seq_lens)
            paths.copy_(torch.arange(max_len, device=paths.device))
        # Those of other requests are not decided yet (`overrule`).
        self._bigrams.add(batch.req_pool_indices, tokens[:, 0], accepted, block.is_chain)
        self._attention.move_kv(slots, paths, accepted.accept_lens)
        rows = paths + torch.arange(0, slots.numel(), slots.shape[1], device=paths.device)[:, None]
        counts = None
        if self._counts is not None:
            # What trees of so many nodes have.
            counts = self._counts[tokens.shape[1], : tokens.shape[1] + self._num_candidates]
            ops.count_paths(
                counts,
                paths,
                accepted.accept_lens,
                tokens,
                batch.spec_info.candidates,
                block.is_chain,
                batch.req_pool_indices,
            )
        return Settled(accepted, output.hidden_states[rows.view(-1)], paths, counts)

    def overrule(self, step: Step, index: torch.Tensor, target_tokens: torch.Tensor) -> Acceptance:
        accepted = super().overrule(step, index, target_tokens)
        self._bigrams.add(step.batch.req_pool_indices[index], step.block_tokens[index, 0], accepted)
        return accepted

    def _slots(self, batch: ForwardBatch, block: Block) -> torch.Tensor:
        return block.out_cache_loc
