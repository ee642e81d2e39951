"""The decode cycle on the GPU, written once: recorded in a CUDA graph, or run as it is.

Shapes: bs requests, W tokens of each block: B, or fewer with `--speculative-adaptive`. The target verifies W rows of a
request, or the N of a tree (`tree_cycle.py`), N not less than W.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_utils import GrammarTree
from torch import nn

from sglang_dflash import ops
from sglang_dflash.attention.plan import chain_attention, prepare_chains
from sglang_dflash.attention.trees import ChainAttentionBackend
from sglang_dflash.draft.context import ContextWriter
from sglang_dflash.draft.head import DraftHead
from sglang_dflash.draft.window import DraftWindow
from sglang_dflash.engine.metrics import APPENDED, BEGUN, DRAFTED, VERIFIED, CycleClock
from sglang_dflash.engine.simulate import SimulatedAcceptance
from sglang_dflash.recurrent.state import RecurrentState
from sglang_dflash.types import Block
from sglang_dflash.verify.acceptance import Acceptance
from sglang_dflash.verify.logits import VerifyLogits


class Forwards(Protocol):
    """How the two forwards of a cycle are run, and where its drafts go.

    Attributes:
        draft_backend: the drafter's attention, for blocks of W tokens.
    """

    draft_backend: AttentionBackend

    def lay_out_draft(self, batch: ForwardBatch) -> None:
        """Prepare `draft_backend` for the drafter's batch."""

    def send_drafts(self, block_tokens: torch.Tensor) -> GrammarTree | None:
        """Have the drafted blocks, [bs, W] int64, brought to the CPU while the target verifies them, if grammars look
        at them there."""

    def verify(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        """Run the target."""


@dataclass(frozen=True)
class CycleInputs:
    """What a cycle of bs requests is launched with: in the static buffers of a CUDA graph, or in memory of its own.

    Attributes:
        padded: blocks of as many requests as the graph has; without one, of the bs requests.
        block: of the bs requests.
        input_ids, positions, out_cache_loc: [bs * rows] int64, of what the target verifies: those of `block`, or of
            trees, which are grown from it.
    """

    padded: Block
    block: Block
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor


@dataclass(frozen=True)
class Settled:
    """What the target's tokens have decided.

    Attributes:
        accepted: of each request.
        hidden_states: [bs * W, ...], as the target captured them: of the block's tokens, or of those that are accepted.
        paths: [bs, W] int64, the nodes of the accepted paths; those of chains are 0 to W - 1. In the memory of a CUDA
            graph, until its next replay.
        tree_counts: [N + K] int64, added up over all cycles with trees of N nodes, of the requests that had one: how
            many accepted each node of theirs, and how many of the accepted drafts were the first, the second, ...
            candidate of their position; None where nobody asks.
    """

    accepted: Acceptance
    hidden_states: torch.Tensor
    paths: torch.Tensor
    tree_counts: torch.Tensor | None = None

    def take(self, bs: int) -> Settled:
        """Of the first `bs` requests; the decision is a copy that the next replay of the graph cannot overwrite."""
        width = self.accepted.out_tokens.shape[1]
        return Settled(self.accepted.take(bs), self.hidden_states[: bs * width], self.paths[:bs], self.tree_counts)


@dataclass(frozen=True)
class Step:
    """What one cycle has done.

    Attributes:
        batch: of the target. The first W rows of a request are its block, if it is not verified as a tree.
        output: of the target: logits, a row for each of the batch, of V numbers or a shard of them.
        settled: what was decided; the drafter's context has the accepted tokens.
        drafts: the blocks on their way to the CPU, where the batch has grammars.
        is_replay: whether it was the replay of a CUDA graph.
    """

    batch: ForwardBatch
    output: LogitsProcessorOutput
    settled: Settled
    drafts: GrammarTree | None
    is_replay: bool = False

    @property
    def accepted(self) -> Acceptance:
        return self.settled.accepted

    @property
    def block_tokens(self) -> torch.Tensor:
        """[bs, W] int64, the bonus token and the draft tokens of each request that is not verified as a tree."""
        return self.of_blocks(self.batch.input_ids)

    @property
    def positions(self) -> torch.Tensor:
        """[bs, W] int64, theirs."""
        return self.of_blocks(self.batch.positions)

    def of_blocks(self, rows: torch.Tensor) -> torch.Tensor:
        """[bs, W, ...] of the rows of the batch."""
        bs, width = self.accepted.out_tokens.shape
        return rows.unflatten(0, (bs, -1))[:, :width]


class DecodeCycle:
    """Draft a block, verify it, accept a prefix, append its hidden states to the drafter's context.

    A TARGET_VERIFY batch travels through it, whose `spec_info` knows W as `draft_token_num`.

    Attributes:
        block_size: B.
        num_rows: of a request that the target verifies, at most.
        verifies_trees: whether these are trees, in memory apart from that of the blocks; else they are the blocks.
        clock: marked at every point of a cycle.
        draft_runner: the drafter's.
        logits: the target's.
    """

    verifies_trees = False
    _chain_attention: ChainAttentionBackend | None = None

    def __init__(
        self,
        draft_runner: ModelRunner,
        target_model: nn.Module,
        head: DraftHead,
        block_size: int,
        window: DraftWindow | None,
        states: RecurrentState | None,
        clock: CycleClock,
    ) -> None:
        """
        Args:
            block_size: B.
            window: of the drafter's context; None: it sees all.
            states: of the target's recurrent layers; None: it has none.
            clock: to be marked at every point of a cycle.
        """
        self.block_size = self.num_rows = block_size
        self.clock = clock
        self.draft_runner = draft_runner
        self._model = draft_runner.model
        self._window = window
        self._states = states
        self._head = head
        self.logits = VerifyLogits(target_model, get_parallel().tp_group)
        self._context = ContextWriter(self._model, draft_runner.token_to_kv_pool)
        # The path of a chain.
        self._chain = torch.arange(block_size, device=draft_runner.device)[None]
        self._simulated = SimulatedAcceptance.from_environment(draft_runner.device)

    def begin_verification(self, target_runner: ModelRunner) -> None:
        """Choose the attention of verified rows. Called when the target has its own, and before graphs are captured."""
        prepare_chains(target_runner.attn_backend)
        self._chain_attention = chain_attention(target_runner, self.block_size)

    def verify_backend(self) -> AttentionBackend | None:
        """Return the target's backend for graphs of one number of rows; None: SGLang's own for that number."""
        return self._chain_attention

    @contextmanager
    def verifying_eagerly(self) -> Iterator[None]:
        """Meanwhile the target has the attention that its rows need without a graph: for chains, its own."""
        yield

    def reload_weights(self) -> None:
        """The drafter's weights have changed."""
        self._context.fuse_weights()

    def begin(self) -> None:
        """On the host, before every cycle."""
        if self._simulated is not None:
            self._simulated.draw(self.block_size)

    def allocate(self, bs: int, num_rows: int) -> CycleInputs:
        """Inputs of a cycle without a graph, of which the target verifies so many rows of a request."""
        device = self.draft_runner.device
        block = Block.empty(bs, min(num_rows, self.block_size), device)
        rows = block.rows
        if self.verifies_trees:
            rows = torch.empty((3, bs * num_rows), dtype=torch.int64, device=device).unbind()
        return CycleInputs(block, block, *rows)

    def run(self, batch: ForwardBatch, block: Block, in_shards: bool, forwards: Forwards) -> Step:
        """One cycle, in which every request is accepted by the plain rule (`_choose`).

        If that is not the rule of all, recurrent states have to be advanced when all is decided.

        Args:
            batch: of the target; the drafts are written to its `input_ids`.
            block: of the same requests: `[bonus, mask x (W - 1)]` of each, in the memory of `batch`.
            in_shards: whether the target's logits stay in their shards; then all requests are greedy.
        """
        self.clock.mark(BEGUN)
        block_tokens = self._draft(batch, block, forwards)
        drafts = forwards.send_drafts(block_tokens)
        self.clock.mark(DRAFTED)
        with self.logits.in_shards(in_shards):
            output = forwards.verify(batch)
        settled = self._settle(batch, block, output, self._choose(output, block, in_shards))
        if self._states is not None:
            self._states.commit(
                batch.req_pool_indices, batch.seq_lens, settled.accepted.accept_lens, settled.paths, block.is_plain
            )
        self.clock.mark(VERIFIED)
        features, _ = self.split_hidden_states(settled.hidden_states)
        # Rejected tokens never enter the drafter's context.
        self._context.write(features, block.positions, self._slots(batch, block), settled.accepted.accept_lens)
        self.clock.mark(APPENDED)
        return Step(batch, output, settled, drafts)

    def draft_batch(self, batch: ForwardBatch, block: Block) -> ForwardBatch:
        """The drafter's batch of blocks; its `seq_lens` are still the target's.

        Args:
            batch: of the target, with `seq_lens_cpu` for planning: lengths with its rows, or upper bounds of them.
            block: of the same requests.
        """
        kv_lens = batch.seq_lens_cpu
        if self._window is not None:
            kv_lens = self._window.host_kv_lens(kv_lens)
        return replace(
            batch,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            seq_lens_cpu=kv_lens,
            seq_lens_sum=int(kv_lens.sum()),
        )

    def _draft(self, batch: ForwardBatch, block: Block, forwards: Forwards) -> torch.Tensor:
        """Draft what the target is to verify: one drafter forward, or none if that is one row.

        Returns:
            [bs, W] int64, the bonus token and the draft tokens, in the memory of `batch.input_ids`.
        """
        block_tokens = block.input_ids.view(batch.batch_size, -1)
        if block_tokens.shape[1] == 1:
            return block_tokens
        return block_tokens.copy_(self._head(block_tokens, self._forward_draft(batch, block, forwards)))

    def _forward_draft(self, batch: ForwardBatch, block: Block, forwards: Forwards) -> torch.Tensor:
        """The drafter's forward of the blocks: hidden states, [bs * W, H]."""
        draft_batch = self.draft_batch(batch, block)
        plan, translator = draft_batch.kv_loc_plan, self.draft_runner.kv_index_translator
        if self._window is not None:
            draft_batch.seq_lens = self._window.fill(batch.req_pool_indices, batch.seq_lens)
            plan = plan.reads_from(
                translator,
                seq_lens=draft_batch.seq_lens,
                seq_lens_cpu=draft_batch.seq_lens_cpu,
                read_extent=draft_batch.spec_info.draft_token_num,
            )
        plan.bind(draft_batch, translator)
        forwards.lay_out_draft(draft_batch)
        with forward_context(ForwardContext(attn_backend=forwards.draft_backend), forward_batch=draft_batch):
            return self._model.forward(block.input_ids, block.positions, draft_batch).hidden_states

    def _choose(self, output: LogitsProcessorOutput, block: Block, in_shards: bool) -> torch.Tensor:
        """The target's token after every row, int64: the argmax of its untouched logits, and of sampled requests a draw
        from their distribution.

        Args:
            block: of the same requests; its `parameters` and `seed` are read.
            in_shards: whether the logits are this rank's own; then all requests are greedy.
        """
        if in_shards:
            return self.logits.argmax(output.next_token_logits)
        maxima, tokens = ops.row_max(output.next_token_logits)
        ops.sample_rows(output.next_token_logits, maxima, tokens, block.parameters, block.seed)
        return tokens

    def _settle(
        self, batch: ForwardBatch, block: Block, output: LogitsProcessorOutput, target_tokens: torch.Tensor
    ) -> Settled:
        """Accept what the target's tokens agree with; `target_tokens`: int64, after every row of the batch."""
        block_tokens = batch.input_ids.view(batch.batch_size, -1)
        paths = self._chain[:, : block_tokens.shape[1]].expand(batch.batch_size, -1)
        return Settled(self._accept(block_tokens, target_tokens, batch.seq_lens), output.hidden_states, paths)

    def _accept(self, block_tokens: torch.Tensor, target_tokens: torch.Tensor, seq_lens: torch.Tensor) -> Acceptance:
        """Accept a prefix of each block.

        Args:
            block_tokens: [bs, W] int64.
            target_tokens: int64, of as many numbers: the target's choice after every token.
            seq_lens: [bs] int64.
        """
        accepted = ops.accept_prefix(block_tokens, target_tokens.view_as(block_tokens), seq_lens)
        if self._simulated is not None:
            accepted = self._simulated(accepted, block_tokens, seq_lens)
        return accepted

    def overrule(self, step: Step, index: torch.Tensor, target_tokens: torch.Tensor) -> Acceptance:
        """Accept other tokens in some blocks of a step. Their context is appended by `append_again`.

        Args:
            index: [n] int64, places in the batch.
            target_tokens: [n, W] int64, the target's choice after every token of their blocks.

        Returns:
            what these n requests accept.
        """
        accepted = self._accept(step.block_tokens[index], target_tokens, step.batch.seq_lens[index])
        step.accepted.put(index, accepted)
        return accepted

    def append_again(self, step: Step, index: torch.Tensor) -> None:
        """Append the tokens to the drafter's context that some requests were found to accept after the others.

        What the step has appended of a block is right where both accept it. Where it was more, the rest lies behind the
        committed tokens, in slots that the request holds for its next blocks, and each block is written before it is
        read: as with all that the drafter leaves there of its own forward.
        """

        def take(values: torch.Tensor) -> torch.Tensor:
            return step.of_blocks(values)[index].flatten(0, 1)

        features, _ = self.split_hidden_states(step.settled.hidden_states)
        slots = self._write_ids(step.batch.kv_loc_plan)
        self._context.write(take(features), take(step.batch.positions), take(slots), step.accepted.accept_lens[index])

    def _slots(self, batch: ForwardBatch, block: Block) -> torch.Tensor:
        """[bs * W] int64, of the blocks in the drafter's KV pool."""
        return self._write_ids(batch.kv_loc_plan)

    def _write_ids(self, plan: KVLocPlan) -> torch.Tensor:
        """[T] int64, the slots that a plan gives to the rows of its batch, as the drafter's pool knows them."""
        return plan.write_ids(self.draft_runner.kv_index_translator)

    def append_prompt(self, output: LogitsProcessorOutput, positions: torch.Tensor, plan: KVLocPlan) -> None:
        """Append prompt tokens to the drafter's context: positions [T], in the slots that `plan` gives them."""
        features, _ = self.split_hidden_states(output.hidden_states)
        self._context.write(features, positions, self._write_ids(plan))

    def split_hidden_states(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The drafter's features, [T, F * H], and what is captured behind them, [T, H] or [T, 0]."""
        return hidden_states.tensor_split([self._model.num_features], dim=1)
