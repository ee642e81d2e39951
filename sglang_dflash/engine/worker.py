"""SGLang's speculative worker for DFlash: each step of the scheduler is a prefill or a decode cycle.

A prefill runs the target over prompts, and appends the target's hidden states to the drafter's context. A decode cycle
then commits several tokens of each request:

    draft    the drafter proposes a block from the last committed token, the bonus token
    verify   the target runs over the drafts, as a chain or a tree of each request
    accept   drafts that agree with the target's tokens are committed, and the target's token after them
    append   the target's hidden states of committed tokens enter the drafter's context

`DFlashWorker._decode` prepares a cycle on the host and reads its result. :meth:`engine.cycle.DecodeCycle.run` is the
cycle on the GPU, where one CUDA graph holds all four steps (engine/graphs.py).

Method: DFlash, block-diffusion drafting conditioned on target hidden states (https://github.com/z-lab/dflash).
Shapes as in :mod:`sglang_dflash.types`: bs requests, W draft length, N verified tokens, T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    compute_position,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.utils.common import async_h2d

from sglang_dflash import ops
from sglang_dflash.attention.plan import is_planned_from_bounds
from sglang_dflash.attention.verify_input import DFlashVerifyInput
from sglang_dflash.draft.runner import DraftModelWorker
from sglang_dflash.engine.backends import override_num_draft_tokens
from sglang_dflash.engine.cycle import CycleInputs
from sglang_dflash.engine.executor import EagerExecutor
from sglang_dflash.engine.graphs import CycleGraphRunner
from sglang_dflash.engine.hidden_states import prompt_hidden_states
from sglang_dflash.engine.metrics import APPENDED, VERIFIED
from sglang_dflash.engine.relay import DFlashDraftInput, host_kv_lens
from sglang_dflash.engine.stages import BuiltCycle, LoadedModels, Pools, Serving, describe
from sglang_dflash.memory import stored_kv
from sglang_dflash.ops import weight_copy
from sglang_dflash.recurrent.prefix_cache import forget_prefill
from sglang_dflash.verify.output import CycleOutput
from sglang_dflash.version import __version__


class DFlashWorker(BaseSpecWorker):
    """Worker of `--speculative-algorithm DFLASH`, with overlap scheduling and without."""

    # --- set-up, in the order in which the scheduler calls it ---------------------------------------------------------

    def __init__(self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker) -> None:
        super().__init__()
        self._target_worker = target_worker
        self._draft_worker = DraftModelWorker(
            server_args, gpu_id, nccl_port, target_worker.model_runner, target_worker.random_seed
        )
        self.device = target_worker.device
        self._loaded = LoadedModels.prepare(server_args, target_worker, self.draft_model_runner)
        # Each is made by one of the methods below.
        self._pools: Pools | None = None
        self._built: BuiltCycle | None = None
        self._serving: Serving | None = None

    def alloc_memory_pool(self, memory_pool_config=None, req_to_token_pool=None, token_to_kv_pool_allocator=None):
        """Give the drafter its own KV pool under the target's slots."""
        loaded, target_runner = self._loaded, self.target_worker.model_runner
        window = Pools.draft_window(loaded.block_size, target_runner.page_size, req_to_token_pool)
        draft_pool = req_to_token_pool if window is None else window.pool
        super().alloc_memory_pool(memory_pool_config, draft_pool, token_to_kv_pool_allocator)
        self.req_to_token_pool = req_to_token_pool
        self._pools = Pools.measure(loaded, target_runner, self.draft_model_runner, memory_pool_config, window)

    def init_attention_backends(self) -> None:
        """Build the drafter's attention backends and the cycle, and have the target's graphs capture it."""
        draft_rows = self.draft_model_runner.model.dflash_config.draft_rows(self._loaded.block_size)
        with override_num_draft_tokens(draft_rows):
            super().init_attention_backends()
        target_runner = self.target_worker.model_runner
        self._built = BuiltCycle.build(self._loaded, self._pools, target_runner, self.draft_model_runner)
        CycleGraphRunner.install(target_runner, self._built.cycle)

    def init_cuda_graphs(self) -> None:
        """Finish set-up. The drafter has no graphs of its own: it runs in those of the target, which exist by now."""
        self._serving = Serving.start(self._loaded, self._built, self._pools, self.target_worker.model_runner)

    # --- one step of the scheduler ------------------------------------------------------------------------------------

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Callable | None = None,
        pp_proxy_tensors: None = None,
    ) -> GenerationBatchResult:
        """Run one step.

        Args:
            batch: prefill (chunk) or one decode cycle of every running request.
            on_publish: overlap scheduling. Takes the new sequence lengths, [bs], as soon as they are known.
            grammar_barrier: overlap scheduling. Brings the requests' grammars up to the last cycle's tokens.
            pp_proxy_tensors: of pipeline parallelism, which is refused.
        """
        self._serving.draft_length.begin_step(batch.forward_mode.is_decode())
        weight_copy.refresh()
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish)
        if batch.forward_mode.is_idle():
            return self._idle(on_publish)
        return self._decode(batch, on_publish, grammar_barrier)

    def _prefill(self, batch: ScheduleBatch, on_publish: Callable | None) -> GenerationBatchResult:
        """Prefill the target and append the prompt to the drafter's context, before the radix cache takes the slots."""
        self._loaded.sampler.prepare_prefill(batch)
        result = self.target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL, return_kv_loc_plan=True
        )
        result.extra_keep_alive_refs = self.begin_requests(batch, result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(batch.seq_lens)
        prefix_lens, extend_lens = (
            async_h2d(lens, dtype=torch.int32, device=self.device) for lens in (batch.prefix_lens, batch.extend_lens)
        )
        backend = self.target_worker.model_runner.prefill_attention_backend_str
        positions, _ = compute_position(backend, prefix_lens, extend_lens, sum(batch.extend_lens))
        plan, result.kv_loc_plan = result.kv_loc_plan, None
        output = result.logits_output
        self._built.cycle.append_prompt(output, positions, plan)
        _, last_hidden_states = self._built.cycle.split_hidden_states(output.hidden_states)
        output.hidden_states = prompt_hidden_states(batch, last_hidden_states, extend_lens)
        result.next_draft_input = DFlashDraftInput(
            bonus_tokens=result.next_token_ids.to(torch.int64), new_seq_lens=batch.seq_lens
        )
        return result

    def begin_requests(self, batch: ScheduleBatch, next_token_ids: torch.Tensor) -> list | None:
        """Begin all state that requests have by slot: penalty counts, bigrams, texts, recurrent states for the cache.

        Every request comes through here before its first decode cycle. A prompt that is prefilled in chunks comes with
        each of them, and begins anew.

        Args:
            batch: a prefill, with the requests that decode in a mixed batch.
            next_token_ids: [bs]. The token after each request's prompt. Ranks may differ before, and agree after.

        Returns:
            Failures of SGLang's sampler, for `GenerationBatchResult.extra_keep_alive_refs`.
        """
        failures = self._loaded.sampler.begin_requests(batch, next_token_ids)
        if self._pools.states is not None:
            self._pools.states.begin_prefill(batch)
        if self._loaded.bigrams is not None:
            self._loaded.bigrams.begin(batch, next_token_ids)
        if self._built.texts is not None:
            self._built.texts.begin(batch, next_token_ids)
        self._built.simulation.begin_requests(batch)
        return failures

    def begin_transferred(self, batch: ScheduleBatch) -> None:
        """Begin the same state for requests that another server has prefilled, with their first token."""
        self._loaded.sampler.begin_transferred(batch)
        self._loaded.bigrams.begin_transferred(batch)
        if self._built.texts is not None:
            self._built.texts.begin_transferred(batch)
        self._built.simulation.begin_requests(batch)

    def _decode(
        self, batch: ScheduleBatch, on_publish: Callable | None, grammar_barrier: Callable | None
    ) -> GenerationBatchResult:
        """Run one decode cycle: draft, verify, accept, append."""
        loaded, cycle, states = self._loaded, self._built.cycle, self._pools.states
        # Requests whose tokens the cycle cannot choose, as indices in the batch.
        fallback = loaded.sampler.needs_fallback(batch)
        is_overlapped = on_publish is not None
        # None: there are no recurrent states, or the cycle advances them itself.
        commit = None if states is None else states.plan_commit(batch, bool(fallback), is_overlapped)
        output = self._run_cycle(batch, fallback, commits=commit is None, is_overlapped=is_overlapped)
        accepted = output.accepted
        # SGLang's sampler decides these requests anew, from the same logits.
        resolved = loaded.sampler.resolve(batch, fallback, output, cycle, grammar_barrier)
        if commit is not None:
            commit.accept(accepted.accept_lens, output.verified.paths)
        if on_publish is not None:
            # The scheduler prepares the next cycle.
            on_publish(accepted.new_seq_lens)
        if resolved.parts:
            loaded.metrics.clock.mark(VERIFIED)
            for index in resolved.parts:
                cycle.append_fallback(output, index)
            loaded.metrics.clock.mark(APPENDED)
        loaded.metrics.end_cycle()
        self._serving.tree_counts.end_cycle(output.verified.tree_counts)
        # The next replay overwrites hidden states before the scheduler has read them.
        _, hidden_states = cycle.split_hidden_states(output.verified.hidden_states)
        output.target_output.hidden_states = hidden_states.clone() if batch.return_hidden_states else None
        return GenerationBatchResult(
            logits_output=output.target_output,
            next_token_ids=accepted.out_tokens.reshape(-1),
            accept_lens=accepted.accept_lens,
            new_seq_lens=accepted.new_seq_lens,
            next_draft_input=DFlashDraftInput(bonus_tokens=accepted.bonus_tokens, new_seq_lens=accepted.new_seq_lens),
            speculative_num_draft_tokens=accepted.out_tokens.shape[1],
            can_run_cuda_graph=output.is_replay,
            extra_keep_alive_refs=[*(resolved.failures or ()), *([commit] if commit is not None else [])],
        )

    def _run_cycle(self, batch: ScheduleBatch, fallback: list[int], commits: bool, is_overlapped: bool) -> CycleOutput:
        """Launch one cycle: a CUDA graph, or eagerly.

        Args:
            fallback: indices of the requests that need SGLang's sampler.
            commits: the cycle advances recurrent states itself.
            is_overlapped: the host prepares the next cycle while this one runs.
        """
        cycle, controller, bs = self._built.cycle, self._serving.draft_length, batch.batch_size()
        cycle.begin()
        num_tokens = controller.choose(batch, fallback)
        graphs = None if self._serving.graphs is None else self._serving.graphs[num_tokens]
        # Not all logits are computed, or gathered from all ranks, where only an argmax reads them.
        is_greedy = not fallback and batch.sampling_info.is_all_greedy
        is_greedy &= cycle.logits.has_faster_argmax(bs * num_tokens)
        static = None if graphs is None else graphs.inputs(bs)
        inputs = cycle.allocate(bs, num_tokens) if static is None else static
        self._fill_blocks(batch, inputs, fallback, commits)
        forward_batch = self._verify_batch(batch, inputs, num_tokens)
        if static is not None and graphs.can_run_graph(forward_batch):
            controller.before_replay(bs, num_tokens)
            with graphs.serving(is_greedy):
                target_output = self._verify(forward_batch, can_run_cuda_graph=True)
            controller.launched(bs, num_tokens, is_timed=is_overlapped and not fallback)
            return graphs.output(forward_batch, target_output, batch.has_grammar)
        # Without a graph, attention backends are those of whole blocks. A CPU's looks at each batch.
        assert graphs is None or num_tokens == cycle.verification.num_tokens
        executor = EagerExecutor(self.draft_model_runner.attn_backend, batch.has_grammar, self._verify)
        controller.launched(bs, num_tokens)
        with cycle.verification.attending_eagerly():
            return cycle.run(forward_batch, inputs.block, is_greedy, executor)

    def _fill_blocks(self, batch: ScheduleBatch, inputs: CycleInputs, fallback: list[int], commits: bool) -> None:
        """Write `[bonus, mask x (W - 1)]` of every request, and how its tokens are drawn, to `inputs.padded`."""
        ops.prepare_block(
            bonus_tokens=batch.spec_info.bonus_tokens,
            seq_lens=batch.seq_lens,
            req_pool_indices=batch.req_pool_indices,
            req_to_token=self.req_to_token_pool.req_to_token,
            mask_token_id=self._loaded.mask_token_id,
            parameters=self._loaded.sampler.draw_parameters(batch.sampling_info),
            request_keys=self._loaded.keys.table,
            advances_states=commits,
            is_chain=self._built.cycle.verification.chains(fallback, len(batch.reqs), self.device),
            block=inputs.padded,
        )

    def _verify_batch(self, batch: ScheduleBatch, inputs: CycleInputs, num_tokens: int) -> ForwardBatch:
        """Return the TARGET_VERIFY batch of N = `num_tokens` tokens a request, in the memory of `inputs`.

        `batch` serves as scratch: the scheduler restores it after this step (`Scheduler._forward_isolation`).
        """
        target_runner = self.target_worker.model_runner
        batch.input_ids, batch.out_cache_loc = inputs.input_ids, inputs.out_cache_loc
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        forget_prefill(batch)
        batch.seq_lens_cpu = host_kv_lens(batch, num_tokens)
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        if target_runner.model_config.model_is_mrope:
            # SGLang derives mRoPE's positions from these.
            self._built.cycle.verification.place_roots(inputs.positions, inputs.block.seq_lens)
        batch.spec_info = DFlashVerifyInput(
            draft_token=inputs.input_ids,
            positions=inputs.positions,
            draft_token_num=num_tokens,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        return ForwardBatch.init_new(
            batch,
            target_runner,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            return_hidden_states_before_norm=False,
        )

    def _verify(self, forward_batch: ForwardBatch, can_run_cuda_graph: bool = False) -> LogitsProcessorOutput:
        """Run the target over a TARGET_VERIFY batch; as a replay, the whole cycle."""
        result = self.target_worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
        assert result.can_run_cuda_graph == can_run_cuda_graph
        return result.logits_output

    def _idle(self, on_publish: Callable | None) -> GenerationBatchResult:
        """Return the result of a rank without requests."""
        draft_input = DFlashDraftInput.idle(self.device)
        if on_publish is not None:
            on_publish(draft_input.new_seq_lens)
        return GenerationBatchResult(
            logits_output=None,
            next_token_ids=draft_input.bonus_tokens,
            accept_lens=draft_input.new_seq_lens,
            new_seq_lens=draft_input.new_seq_lens,
            next_draft_input=draft_input,
            speculative_num_draft_tokens=self._loaded.block_size,
            can_run_cuda_graph=False,
        )

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """Learn from the oldest decode cycle that has not been learned from. The scheduler has read its result."""
        in_trees = self._serving.tree_counts.complete()
        num_tokens = self._serving.draft_length.completed(num_correct_drafts_per_req, in_trees)
        ranks = [] if in_trees is None else in_trees.ranks
        self._loaded.metrics.complete(num_correct_drafts_per_req, num_tokens, ranks)

    # --- what others ask for ------------------------------------------------------------------------------------------

    @property
    def draft_model_runner(self) -> ModelRunner:
        return self._draft_worker.model_runner

    @property
    def model_runner(self) -> ModelRunner:
        """The drafter's, which `/save_remote_model` looks for here."""
        return self.draft_model_runner

    def weight_update_runners(self) -> list[tuple[str, ModelRunner]]:
        return [("draft", self.draft_model_runner)]

    def update_drafter(self, path: str, load_format: str) -> tuple[bool, str]:
        """Load the drafter's weights from another checkpoint of the same shape."""
        success, message = self.draft_model_runner.weight_updater.update_weights_from_disk(path, load_format)
        if success:
            self._built.cycle.reload_weights()
            stored_kv.note_update(path)
        return success, message

    @property
    def spec_v2_attn_backends(self) -> tuple:
        """Backends that need exact sequence lengths on the CPU. For them each cycle waits for the last one."""
        verifying = self._built.cycle.verification.target_backends()
        backends = (self.draft_model_runner.attn_backend, *verifying)
        return tuple(backend for backend in backends if not is_planned_from_bounds(backend))

    def describe(self) -> dict:
        """Return what `/server_info` shows."""
        described = describe(self._loaded, self._pools, self._built, self._serving, self.draft_model_runner)
        return {"version": __version__, "worker": type(self).__name__, **described}
