"""DFlash's decode cycle: draft a block, verify it, accept a prefix, append its hidden states to the drafter's context.

Method: DFlash, block-diffusion drafting conditioned on target hidden states (https://github.com/z-lab/dflash).
Shapes: bs requests, B rows of a block, T tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.distributed.parallel_state_wrapper import ParallelState
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import GrammarTree

from sglang_dflash import ops
from sglang_dflash.accept import Acceptance
from sglang_dflash.context import ContextWriter
from sglang_dflash.draft_head import DraftHead
from sglang_dflash.draft_window import DraftWindow
from sglang_dflash.drafter_runner import build_draft_worker
from sglang_dflash.graphs import GraphTail
from sglang_dflash.hidden_states import capture_last_hidden_states
from sglang_dflash.info import DFlashDraftInput, DFlashVerifyInput
from sglang_dflash.memory import KVMemory, check_window_pool
from sglang_dflash.metrics import CycleMetrics
from sglang_dflash.sampling import BlockSampler, takes_argmax
from sglang_dflash.simulate import SIMULATED, simulate_acceptance
from sglang_dflash.verify_logits import keep_model_dtype
from sglang_dflash.version import __version__
from sglang_dflash.weights import differences

logger = logging.getLogger(__name__)


class DFlashWorker(BaseSpecWorker):
    """Serves `--speculative-algorithm DFLASH`, with overlap scheduling and without."""

    def __init__(
        self, server_args: ServerArgs, gpu_id: int, ps: ParallelState, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__()
        self._target_worker = target_worker
        self._draft_worker = build_draft_worker(server_args, gpu_id, ps, nccl_port, target_worker)
        self.device = target_worker.device
        self.block_size = server_args.speculative_num_draft_tokens
        self._metrics = CycleMetrics(server_args, ps, self.block_size, self.device)

        target_model = target_worker.model_runner.model
        draft_model = self.draft_model_runner.model
        draft_model.use_target_embedding(target_model.get_input_embeddings())
        keep_model_dtype(target_model)
        if server_args.enable_return_hidden_states:
            capture_last_hidden_states(target_model)
        self._mask_token_id = draft_model.dflash_config.mask_token_id
        self._draft_window: DraftWindow | None = None
        self._draft_head = DraftHead.of(draft_model, target_model.lm_head, get_tp_group())
        # Drafter blocks differ from target ones only in who verifies them; one shape-only object serves all cycles.
        self._draft_spec_info = DFlashVerifyInput(
            draft_token=None,
            positions=None,
            draft_token_num=self.block_size,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )

    # --- set-up, in the order in which the scheduler calls it -------------------------------------------------------

    @property
    def draft_model_runner(self):
        return self._draft_worker.model_runner

    @property
    def spec_v2_attn_backends(self) -> tuple:
        return (self.target_worker.model_runner.attn_backend, self.draft_model_runner.attn_backend)

    def alloc_memory_pool(self, memory_pool_config=None, req_to_token_pool=None, token_to_kv_pool_allocator=None):
        """Give the drafter its own KV pool under the target's slots, and hook our work into the graphs to come."""
        target_runner = self.target_worker.model_runner
        window = target_runner.server_args.speculative_draft_window_size
        if window is not None:
            self._draft_window = DraftWindow(window, target_runner.page_size, self.block_size, req_to_token_pool)
        draft_rows = req_to_token_pool if window is None else self._draft_window.pool
        super().alloc_memory_pool(memory_pool_config, draft_rows, token_to_kv_pool_allocator)
        self.req_to_token_pool = req_to_token_pool
        check_window_pool(memory_pool_config, target_runner.sliding_window_size, target_runner.page_size)
        self._kv_memory = KVMemory.measure(target_runner.token_to_kv_pool, self.draft_model_runner.token_to_kv_pool)
        logger.info("%s", self._kv_memory)
        self._context = ContextWriter(self.draft_model_runner.model, self.draft_model_runner.token_to_kv_pool)
        self._propose = GraphTail(self.draft_model_runner, self._fill_block)
        self._decide = GraphTail(target_runner, self._accept_argmax)
        self._sampler = BlockSampler(target_runner, get_tp_group())

    def describe(self) -> dict:
        """What `/server_info` shows."""
        return {
            "version": __version__,
            "worker": type(self).__name__,
            "block_size": self.block_size,
            "draft_attention_backend": self.draft_model_runner.server_args.attention_backend,
            "draft_window_size": self.draft_model_runner.server_args.speculative_draft_window_size,
            "kv_capacity_tokens": self._kv_memory.capacity,
            "kv_bytes_per_token": {
                "target": self._kv_memory.target_bytes_per_token,
                "drafter": self._kv_memory.drafter_bytes_per_token,
            },
            **self._metrics.snapshot(),
        }

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """The scheduler has read the result of the oldest decode cycle that it had not."""
        self._metrics.complete(num_correct_drafts_per_req)

    def update_drafter(self, path: str, load_format: str) -> tuple[bool, str]:
        """Take the drafter's weights from another checkpoint of the same shape; if it has another, False and why."""
        problems = differences(path, self.draft_model_runner.model.dflash_config)
        if problems:
            return False, f"drafter {path} cannot take the place of the one that serves: {'; '.join(problems)}."
        success, message = self.draft_model_runner.weight_updater.update_weights_from_disk(path, load_format)
        if success:
            self._context.fuse_weights()
        return success, message

    def update_weights_from_disk(self, recv_req) -> tuple[bool, str]:
        """The request names a checkpoint of the target, which has just been updated; the drafter keeps its own."""
        return True, "The target's weights were updated; the DFlash drafter keeps its weights."

    def update_weights_from_ipc(self, recv_req) -> tuple[bool, str]:
        return self.update_weights_from_disk(recv_req)

    # --- the cycle --------------------------------------------------------------------------------------------------

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Callable | None = None,
    ) -> GenerationBatchResult:
        """One scheduler step.

        Args:
            batch: prefill (chunk) or one decode cycle of every running request.
            on_publish: overlap scheduling; takes the new sequence lengths, [bs], as soon as they are known.
            grammar_barrier: overlap scheduling; brings the requests' grammars up to the last cycle's tokens.
        """
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish)
        if batch.forward_mode.is_idle():
            return self._idle(on_publish)
        draft_input: DFlashDraftInput = batch.spec_info
        self._metrics.begin()

        # 1. Draft: [bonus, mask x (B - 1)] through the drafter, one argmax per row.
        block_ids, positions, out_cache_loc = ops.prepare_block(
            draft_input.bonus_tokens,
            batch.seq_lens,
            batch.req_pool_indices,
            self.req_to_token_pool.req_to_token,
            self._mask_token_id,
            self.block_size,
        )
        positions, out_cache_loc = positions.view(-1), out_cache_loc.view(-1)
        # The scheduler restores the batch after this step (`Scheduler._forward_isolation`), so it serves as scratch.
        batch.seq_lens_cpu, batch.seq_lens_sum = self._host_kv_lens(batch, draft_input)
        block_tokens = self._draft(batch, block_ids, positions, out_cache_loc)
        self._metrics.mark()

        # 2. Verify the block as a causal chain.
        grammar_tree = GrammarTree.from_linear_chain(block_tokens) if batch.has_grammar else None
        output, verified = self._verify(batch, block_tokens, positions, out_cache_loc)

        # 3. Accept a prefix of it: usually decided at the end of the target's forward already.
        if takes_argmax(batch):
            accepted = self._accepted_argmax(output, verified, batch.batch_size())
        else:
            target_tokens = self._sampler(
                batch, output.logits_output, block_tokens, positions, grammar_tree, grammar_barrier
            )
            accepted = ops.accept_prefix(block_tokens, target_tokens, batch.seq_lens)
        if SIMULATED:
            accepted = simulate_acceptance(accepted, block_tokens, batch.seq_lens)
        self._metrics.mark()

        # 4. Publish: the scheduler prepares the next cycle while this one appends.
        if on_publish is not None:
            on_publish(accepted.new_seq_lens)

        # 5. Append the committed rows to the drafter's context. Rejected rows never enter it.
        features, last_hidden_states = self._split_hidden_states(output)
        self._context.write(features, positions, out_cache_loc, accepted.accept_lens)
        self._metrics.mark()
        self._sampler.end_cycle(batch, accepted)
        # The next replay of the target's graph overwrites them before the scheduler has read them.
        output.logits_output.hidden_states = last_hidden_states.clone() if batch.return_hidden_states else None
        return self._result(accepted, output)

    def _draft(
        self,
        batch: ScheduleBatch,
        block_ids: torch.Tensor,
        positions: torch.Tensor,
        out_cache_loc: torch.Tensor,
    ) -> torch.Tensor:
        """Run the drafter over the block.

        Args:
            block_ids: [bs, B]; positions, out_cache_loc: [bs * B].

        Returns:
            [bs, B] int64, the bonus token and the draft tokens.
        """
        bs = batch.batch_size()
        context_lens, kv_lens_cpu, kv_lens_sum = batch.seq_lens, batch.seq_lens_cpu, batch.seq_lens_sum
        if self._draft_window is not None:
            context_lens = self._draft_window.fill(batch.req_pool_indices, batch.seq_lens)
            kv_lens_cpu = self._draft_window.host_kv_lens(kv_lens_cpu)
            kv_lens_sum = int(kv_lens_cpu.sum())
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=block_ids.view(-1),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=context_lens,
            seq_lens_cpu=kv_lens_cpu,
            seq_lens_sum=kv_lens_sum,
            out_cache_loc=out_cache_loc,
            positions=positions,
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._draft_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        out = self.draft_model_runner.forward(forward_batch)
        if out.can_run_graph:
            return self._propose.replayed()[:bs]
        return self._propose.eager(out.logits_output, forward_batch)

    def _fill_block(self, output: LogitsProcessorOutput, forward_batch: ForwardBatch) -> torch.Tensor:
        """Behind the drafter's forward: [bs, B] tokens from its hidden states."""
        return self._draft_head(forward_batch.input_ids.view(-1, self.block_size), output.hidden_states)

    def _verify(
        self,
        batch: ScheduleBatch,
        block_tokens: torch.Tensor,
        positions: torch.Tensor,
        out_cache_loc: torch.Tensor,
    ) -> tuple[GenerationBatchResult, ForwardBatch]:
        """Run the target over the block in TARGET_VERIFY mode; the batch serves as scratch."""
        batch.input_ids = block_tokens.view(-1)
        batch.out_cache_loc = out_cache_loc
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.spec_info = DFlashVerifyInput(
            draft_token=batch.input_ids,
            positions=positions,
            draft_token_num=self.block_size,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        forward_batch = ForwardBatch.init_new(
            batch,
            self.target_worker.model_runner,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            return_hidden_states_before_norm=False,
        )
        output = self.target_worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
        return output, forward_batch

    def _accept_argmax(self, output: LogitsProcessorOutput, forward_batch: ForwardBatch) -> Acceptance:
        """Behind the target's forward: compare its argmax with the block."""
        return ops.accept_prefix(
            forward_batch.input_ids.view(-1, self.block_size),
            output.next_token_logits.argmax(dim=-1).view(-1, self.block_size),
            forward_batch.seq_lens,
        )

    def _accepted_argmax(self, output: GenerationBatchResult, forward_batch: ForwardBatch, bs: int) -> Acceptance:
        if output.can_run_cuda_graph:
            return self._decide.replayed().take(bs)
        return self._decide.eager(output.logits_output, forward_batch)

    def _split_hidden_states(self, output: GenerationBatchResult) -> tuple[torch.Tensor, torch.Tensor]:
        """The drafter's features, [T, F * H], and what is captured behind them, [T, H] or [T, 0]."""
        hidden_states = output.logits_output.hidden_states
        num_features = self.draft_model_runner.model.fc.in_features
        return hidden_states[:, :num_features], hidden_states[:, num_features:]

    def _prefill(self, batch: ScheduleBatch, on_publish: Callable | None) -> GenerationBatchResult:
        """Prefill the target and append the prompt to the drafter's context, before the radix cache takes the slots."""
        self._sampler.begin_prefill(batch)
        result = self.target_worker.forward_batch_generation(batch, capture_hidden_mode=CaptureHiddenMode.FULL)
        self._sampler.end_prefill(batch, result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(batch.seq_lens)
        positions = torch.cat(
            [
                torch.arange(prefix, prefix + extend)
                for prefix, extend in zip(batch.prefix_lens, batch.extend_lens, strict=True)
            ]
        ).to(self.device, non_blocking=True)
        features, last_hidden_states = self._split_hidden_states(result)
        self._context.write(features, positions, batch.out_cache_loc)
        result.logits_output.hidden_states = last_hidden_states if batch.return_hidden_states else None
        result.next_draft_input = DFlashDraftInput(
            bonus_tokens=result.next_token_ids.to(torch.int64), new_seq_lens=batch.seq_lens
        )
        return result

    def _idle(self, on_publish: Callable | None) -> GenerationBatchResult:
        """A rank without requests."""
        draft_input = DFlashDraftInput.idle(self.device)
        if on_publish is not None:
            on_publish(draft_input.new_seq_lens)
        return GenerationBatchResult(
            logits_output=None,
            next_token_ids=draft_input.bonus_tokens,
            accept_lens=draft_input.new_seq_lens,
            new_seq_lens=draft_input.new_seq_lens,
            next_draft_input=draft_input,
            speculative_num_draft_tokens=self.block_size,
            can_run_cuda_graph=False,
        )

    def _result(self, accepted: Acceptance, output: GenerationBatchResult) -> GenerationBatchResult:
        return GenerationBatchResult(
            logits_output=output.logits_output,
            next_token_ids=accepted.out_tokens.reshape(-1),
            accept_lens=accepted.accept_lens,
            new_seq_lens=accepted.new_seq_lens,
            next_draft_input=DFlashDraftInput(bonus_tokens=accepted.bonus_tokens, new_seq_lens=accepted.new_seq_lens),
            speculative_num_draft_tokens=self.block_size,
            can_run_cuda_graph=output.can_run_cuda_graph,
        )

    def _host_kv_lens(self, batch: ScheduleBatch, draft_input: DFlashDraftInput) -> tuple[torch.Tensor, int]:
        """KV lengths on the CPU for planning, the block included: exact where a backend asked the scheduler for
        sequence lengths (`needs_cpu_seq_lens`), else upper bounds known without waiting for the GPU."""
        if batch.seq_lens_cpu is not None:
            kv_lens = batch.seq_lens_cpu + self.block_size
        else:
            kv_lens = draft_input.reserved_seq_lens_cpu
        return kv_lens, int(kv_lens.sum())
