"""The decode cycle on the GPU: draft, verify, accept, append. It runs eagerly, or is captured in a CUDA graph.

Shapes as in :mod:`sglang_dflash.types`: bs requests, W draft length, N verified tokens, T tokens, F captured target
layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash import ops
from sglang_dflash.draft.context import ContextWriter
from sglang_dflash.draft.head import DraftHead
from sglang_dflash.draft.window import DraftWindow
from sglang_dflash.engine.executor import CycleExecutor
from sglang_dflash.engine.metrics import APPENDED, BEGUN, DRAFTED, VERIFIED, CycleClock
from sglang_dflash.engine.simulate import Simulation
from sglang_dflash.engine.verification import Drafts, Verification
from sglang_dflash.ops import add_norm
from sglang_dflash.recurrent.state import RecurrentState
from sglang_dflash.types import Block
from sglang_dflash.verify.logits import VerifyLogits
from sglang_dflash.verify.output import CycleOutput

# No target chooses it.
_NO_TOKEN = -1


@dataclass(frozen=True)
class CycleInputs:
    """Memory that a cycle of bs requests is launched with: static buffers of a CUDA graph, or its own.

    Attributes:
        padded: blocks of the P requests of the graph; without a graph, of the bs requests.
        block: blocks of the bs requests.
        input_ids, positions, out_cache_loc: [bs * N] int64 of the verified tokens. Of chains they are those of `block`;
            trees are grown from it.
    """

    padded: Block
    block: Block
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor


class DecodeCycle:
    """Draft a block, verify it, accept a prefix or a path, append its hidden states to the drafter's context.

    Attributes:
        block_size: B.
        verification: chains or trees.
        draft_runner: the drafter's.
        logits: the target's.
        clock: marked at every point of a cycle.
    """

    def __init__(
        self,
        draft_runner: ModelRunner,
        logits: VerifyLogits,
        head: DraftHead,
        block_size: int,
        verification: Verification,
        window: DraftWindow | None,
        states: RecurrentState | None,
        simulation: Simulation,
        clock: CycleClock,
    ) -> None:
        """
        Args:
            draft_runner: of the drafter, with its KV pool.
            logits: the target's.
            head: the drafter's lm_head.
            block_size: B.
            verification: chains or trees.
            window: the part of the context that the drafter sees; None: all of it.
            states: of the target's recurrent layers; None: it has none.
            simulation: the one of `verification`.
            clock: see the class.
        """
        self.block_size, self.verification = block_size, verification
        self.draft_runner, self.clock = draft_runner, clock
        self.logits = logits
        self._model, self._head = draft_runner.model, head
        self._window, self._states, self._simulation = window, states, simulation
        self._context = ContextWriter(self._model, draft_runner.token_to_kv_pool)

    def begin(self) -> None:
        """Prepare a cycle on the host."""
        self._simulation.begin_cycle(self.block_size)

    def allocate(self, bs: int, num_tokens: int) -> CycleInputs:
        """Return inputs of a cycle without a graph that verifies N = `num_tokens` tokens of each request."""
        device = self.draft_runner.device
        rows = torch.empty((3, bs * num_tokens), dtype=torch.int64, device=device).unbind()
        requests = torch.empty((2, bs), dtype=torch.int64, device=device).unbind()
        draft_length = min(num_tokens, self.block_size)
        block = Block.of(*self.verification.block_rows(rows, bs * draft_length), *requests)
        return CycleInputs(block, block, *rows)

    @add_norm.in_cycle()
    def run(self, batch: ForwardBatch, block: Block, is_greedy: bool, executor: CycleExecutor) -> CycleOutput:
        """Run one cycle, in which the target's tokens are chosen by the fast path (`_choose`) for all requests.

        If a request needs SGLang's sampler, its tokens are accepted anew afterwards (`accept_fallback`), and recurrent
        states advance only then.

        Args:
            batch: the target's TARGET_VERIFY batch. The drafts are written to it.
            block: `[bonus, mask x (W - 1)]` of the same requests.
            is_greedy: nothing but an argmax reads the target's logits, so not all of them are computed or gathered.
            executor: runs the forwards.
        """
        self.clock.mark(BEGUN)
        # 1. Draft: one forward of the drafter, or none for W = 1.
        drafts = self._draft(batch, block, executor)
        grammar_tree = executor.send_drafts(drafts.block_tokens)
        self.clock.mark(DRAFTED)
        # 2. Verify: one forward of the target.
        with self.logits.for_argmax(is_greedy, batch.input_ids.shape[0]):
            output = executor.verify(batch)
        # 3. Accept the drafts that agree with the target, and one token of the target's after them.
        target_tokens = self._simulation.choose(
            self._choose(batch, output, block, is_greedy), batch.positions, batch.seq_lens, batch.req_pool_indices
        )
        verified = self.verification.accept(batch, block, drafts, output, target_tokens)
        if self._states is not None:
            self._states.commit(
                batch.req_pool_indices,
                batch.seq_lens,
                verified.accepted.accept_lens,
                verified.paths,
                block.advances_states,
            )
        self.clock.mark(VERIFIED)
        # 4. Append: only accepted tokens enter the drafter's context.
        features, _ = self.split_hidden_states(verified.hidden_states)
        slots = self.verification.context_slots(batch, block, self.draft_runner)
        self._context.write(features, block.positions, slots, verified.accepted.accept_lens)
        self.clock.mark(APPENDED)
        return CycleOutput(batch, output, verified, grammar_tree)

    def draft_rows(self, draft_length: int) -> int:
        """Return the rows of the drafter's forward for W = `draft_length`."""
        return self._model.dflash_config.draft_rows(draft_length)

    def draft_block(self, block: Block) -> Block:
        """Return the rows of blocks that the drafter's forward has."""
        return block.first_rows(self.draft_rows(block.input_ids.shape[0] // block.seq_lens.shape[0]))

    def draft_batch(self, batch: ForwardBatch, block: Block) -> ForwardBatch:
        """Return the drafter's batch of blocks. Its `seq_lens` are still the target's.

        Args:
            batch: the target's, with `seq_lens_cpu` for planning: lengths with the N verified tokens, or upper bounds.
            block: the drafter's rows of the same requests.
        """
        kv_lens = batch.seq_lens_cpu
        if self._window is not None:
            kv_lens = self._window.host_kv_lens(kv_lens)
        blocks = replace(
            batch,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            seq_lens_cpu=kv_lens,
            seq_lens_sum=int(kv_lens.sum()),
        )
        return self.verification.block_batch(blocks, block, self.draft_runner)

    def _draft(self, batch: ForwardBatch, block: Block, executor: CycleExecutor) -> Drafts:
        """Write drafts to the target's batch."""
        if block.input_ids.shape[0] == batch.batch_size:
            return self.verification.draft_root(batch, block)
        hidden_states = self._forward_draft(batch, block, executor)
        return self.verification.draft(self._head, hidden_states, batch, block)

    def _forward_draft(self, batch: ForwardBatch, block: Block, executor: CycleExecutor) -> torch.Tensor:
        """Run the drafter over its rows of the blocks and return their hidden states, [bs * rows, H]."""
        block = self.draft_block(block)
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
        executor.plan_draft(draft_batch)
        with forward_context(ForwardContext(attn_backend=executor.draft_backend), forward_batch=draft_batch):
            return self._model.forward(block.input_ids, block.positions, draft_batch).hidden_states

    def _choose(
        self, batch: ForwardBatch, output: LogitsProcessorOutput, block: Block, is_greedy: bool
    ) -> torch.Tensor:
        """Choose the target's token after each verified token, from its untouched logits.

        Args:
            batch: the target's, with the positions of the verified tokens.
            output: the target's.
            block: the same requests. Its `parameters` and `keys` say how sampled requests draw. Others take the argmax.
            is_greedy: see :meth:`run`.

        Returns:
            [bs * N] int64.
        """
        if is_greedy:
            return self.logits.argmax(output.next_token_logits)
        logits = output.next_token_logits
        maxima, tokens = ops.row_max(logits)
        ops.sample_rows(logits, maxima, tokens, block.parameters, block.keys, batch.positions)
        return tokens

    # --- requests that need SGLang's sampler --------------------------------------------------------------------------

    def accept_fallback(self, output: CycleOutput, index: torch.Tensor, target_tokens: torch.Tensor) -> None:
        """Accept what agrees with the tokens of SGLang's sampler, in place of what the cycle has accepted.

        Args:
            output: of the cycle. Its `accepted` is changed.
            index: [n] int64, indices of these requests in the batch.
            target_tokens: [n, W] int64, the sampler's token after every token of their blocks.
        """
        seq_lens = output.batch.seq_lens[index]
        # A chain of nodes ends early where the drafter's logits are NaN. The nodes after it are at the root's position.
        places = seq_lens[:, None] + torch.arange(target_tokens.shape[1], device=seq_lens.device)
        block_tokens = output.block_tokens[index].masked_fill(output.positions[index] != places, _NO_TOKEN)
        accepted = self.verification.accept_chains(
            block_tokens, target_tokens, seq_lens, output.batch.req_pool_indices[index]
        )
        output.accepted.put(index, accepted)

    def append_fallback(self, output: CycleOutput, index: torch.Tensor) -> None:
        """Append the context of requests that SGLang's sampler decided.

        The cycle has appended what it accepted itself. Tokens that both accept are right. If it was more, the rest is
        in slots that the request holds for its next blocks, after the committed tokens, and is overwritten before it is
        read.

        Args:
            output: of the cycle, after `accept_fallback`.
            index: [n] int64, indices of these requests in the batch.
        """

        def take(values: torch.Tensor) -> torch.Tensor:
            return output.of_blocks(values)[index].flatten(0, 1)

        features, _ = self.split_hidden_states(output.verified.hidden_states)
        slots = self._slots(output.batch.kv_loc_plan)
        accept_lens = output.accepted.accept_lens[index]
        self._context.write(take(features), take(output.batch.positions), take(slots), accept_lens)

    # --- the drafter's context and weights ----------------------------------------------------------------------------

    def append_prompt(self, output: LogitsProcessorOutput, positions: torch.Tensor, plan: KVLocPlan) -> None:
        """Append prompt tokens to the drafter's context.

        Args:
            output: the target's, with hidden states of T tokens.
            positions: [T].
            plan: the slots of these tokens.
        """
        features, _ = self.split_hidden_states(output.hidden_states)
        self._context.write(features, positions, self._slots(plan))

    def _slots(self, plan: KVLocPlan) -> torch.Tensor:
        """Return the plan's slots in the drafter's KV pool, [T] int64."""
        return plan.write_ids(self.draft_runner.kv_index_translator)

    def split_hidden_states(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the drafter's features, [T, F * H], and the target's last hidden states, [T, H], or [T, 0] if they
        are not captured."""
        return hidden_states.tensor_split([self._model.num_features], dim=1)

    def reload_weights(self) -> None:
        """Take note of new drafter weights."""
        self._context.fuse_weights()
