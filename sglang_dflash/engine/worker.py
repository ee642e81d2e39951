"""SGLang's speculative worker for DFlash: each step of the scheduler is a prefill or a decode cycle.

Method: DFlash, block-diffusion drafting conditioned on target hidden states (https://github.com/z-lab/dflash).
Shapes: bs requests, B tokens of a block, T tokens.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    compute_position,
    get_server_return_hidden_states_mode,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_exec, get_observability, get_parallel, get_schedule, get_spec
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_utils import GrammarTree
from sglang.srt.utils.common import async_h2d, log_info_on_rank0

from sglang_dflash import cpu_support, ops
from sglang_dflash.attention.plan import is_planned_from_bounds
from sglang_dflash.attention.trees import TreeAttentionBackend, tree_obstacle
from sglang_dflash.checkpoint.config import ConfigError
from sglang_dflash.draft.bigrams import Bigrams
from sglang_dflash.draft.head import DraftHead
from sglang_dflash.draft.runner import DraftModelWorker
from sglang_dflash.draft.window import DraftWindow
from sglang_dflash.engine.adaptive.acceptance import ChainAcceptance, TreeAcceptance
from sglang_dflash.engine.adaptive.controller import (
    CYCLES_PER_CHOICE,
    CpuController,
    DraftLengthController,
    FixedLength,
    GpuController,
    chain_lengths,
    tree_lengths,
)
from sglang_dflash.engine.cycle import CycleInputs, DecodeCycle, Step
from sglang_dflash.engine.graphs import CycleGraphRunner, CycleGraphs, override_num_draft_tokens
from sglang_dflash.engine.hidden_states import capture_last_hidden_states
from sglang_dflash.engine.metrics import APPENDED, VERIFIED, CycleMetrics, TreeCounts
from sglang_dflash.engine.relay import DFlashDraftInput, DFlashVerifyInput, host_kv_lens
from sglang_dflash.engine.tree_cycle import TreeCycle
from sglang_dflash.memory.limits import check_pool, check_window_pool
from sglang_dflash.memory.pool_sizing import CycleMemory, KVMemory
from sglang_dflash.ops import add_norm, small_m_linear
from sglang_dflash.recurrent.prefix_cache import forget_prefill
from sglang_dflash.recurrent.state import RecurrentState
from sglang_dflash.server_args.trees import asks_for_trees, num_candidates
from sglang_dflash.verify.sampler import FallbackResult, FallbackSampler
from sglang_dflash.version import __version__

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Eager:
    """The :class:`sglang_dflash.engine.cycle.Forwards` of a cycle that is run as it is."""

    draft_backend: AttentionBackend
    has_grammar: bool
    verify: Callable[[ForwardBatch], LogitsProcessorOutput]

    def lay_out_draft(self, batch: ForwardBatch) -> None:
        self.draft_backend.init_forward_metadata(batch)

    def send_drafts(self, block_tokens: torch.Tensor) -> GrammarTree | None:
        return GrammarTree.from_linear_chain(block_tokens) if self.has_grammar else None


@cache
def _log_chains() -> None:
    logger.info(
        "Requests that SGLang's sampler chooses for (those with grammars, penalties, min_new_tokens, biases, "
        "processors, log probabilities, seeds or all three filters) are verified in chains, not in trees."
    )


class DFlashWorker(BaseSpecWorker):
    """Serves `--speculative-algorithm DFLASH`, with overlap scheduling and without."""

    def __init__(self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker) -> None:
        super().__init__()
        self._target_worker = target_worker
        self._draft_worker = DraftModelWorker(
            server_args, gpu_id, nccl_port, target_worker.model_runner, target_worker.random_seed
        )
        self.device = target_worker.device
        self.block_size = get_spec().speculative_dflash_block_size
        self._num_candidates = num_candidates(server_args, target_worker.model_runner.model_config)
        self._asks_for_trees = asks_for_trees(server_args)
        self._metrics = CycleMetrics(self.block_size, self.device)

        target_model = target_worker.model_runner.model
        draft_model = self.draft_model_runner.model
        draft_model.use_target_embedding(target_model.get_input_embeddings())
        for model in (target_model, draft_model):
            if self.device == "cpu":
                cpu_support.install_layers(model)
            else:
                add_norm.install(model, follows_few_rows=small_m_linear.install(model) > 0)
        if get_exec().features.enable_return_hidden_states:
            capture_last_hidden_states(target_model)
        tp_group = get_parallel().tp_group
        # Before SGLang sizes its pools by the memory that is left.
        self._head = DraftHead.of(draft_model, target_model.lm_head, tp_group, self._num_candidates)
        # Request slots are no more than running requests, and one for padding.
        num_slots = get_schedule().max_running_requests + 1
        self._sampler = FallbackSampler(target_worker.model_runner, num_slots, tp_group)
        self._bigrams = Bigrams(num_slots, self.device) if self._num_candidates > 1 else None
        # Equal on all tensor-parallel ranks, which run the same cycles.
        self._seeds = random.Random(target_worker.random_seed)
        self._mask_token_id = draft_model.dflash_config.mask_token_id

    # --- one step of the scheduler ------------------------------------------------------------------------------------

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Callable | None = None,
        pp_proxy_tensors: None = None,
    ) -> GenerationBatchResult:
        """One scheduler step.

        Args:
            batch: prefill (chunk) or one decode cycle of every running request.
            on_publish: overlap scheduling; takes the new sequence lengths, [bs], as soon as they are known.
            grammar_barrier: overlap scheduling; brings the requests' grammars up to the last cycle's tokens.
            pp_proxy_tensors: of pipeline parallelism, which is refused; passed without overlap scheduling.
        """
        self._draft_length.begin_step(batch.forward_mode.is_decode())
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish)
        if batch.forward_mode.is_idle():
            return self._idle(on_publish)
        self._head.refresh()
        seq_lens = batch.seq_lens
        fallback = self._sampler.needs_fallback(batch)
        slots = None
        if fallback and self._states is not None:
            # The scheduler may give them to other requests once the replay is done.
            slots = self._states.copy_slots(batch.req_pool_indices)
        step = self._run_cycle(batch, fallback, is_overlapped=on_publish is not None)
        resolved = self._sampler.resolve(batch, fallback, step, self._cycle, grammar_barrier)
        if slots is not None:
            self._states.commit_copied(slots, seq_lens, step.accepted.accept_lens, step.settled.paths)
        if on_publish is not None:
            # The scheduler prepares the next cycle.
            on_publish(step.accepted.new_seq_lens)
        return self._end_cycle(batch, step, resolved)

    def _run_cycle(self, batch: ScheduleBatch, fallback: list[int], is_overlapped: bool) -> Step:
        """Run one cycle, which chooses the tokens of all requests.

        Args:
            fallback: batch indices of requests whose tokens are chosen again by SGLang's sampler.
            is_overlapped: whether the host prepares the next one while this one runs.
        """
        cycle, bs = self._cycle, batch.batch_size()
        cycle.begin()
        width = self._draft_length.choose(batch, fallback)
        graphs = None if self._graphs is None else self._graphs[width]
        # Of greedy requests no rank needs the logits of the others.
        in_shards = not fallback and batch.sampling_info.is_all_greedy and cycle.logits.have_shards
        static = None if graphs is None else graphs.inputs(bs)
        inputs = cycle.allocate(bs, width) if static is None else static
        self._fill_blocks(batch, inputs, fallback)
        forward_batch = self._verify_batch(batch, inputs, width)
        if static is not None and graphs.can_run_graph(forward_batch):
            self._draft_length.before_replay()
            with graphs.serving(in_shards):
                output = self._verify(forward_batch, can_run_cuda_graph=True)
            self._draft_length.launched(bs, width, is_timed=is_overlapped and not fallback)
            return graphs.step(forward_batch, output, batch.has_grammar)
        # Without a graph, attention backends have the queries of whole blocks; a CPU's looks at each batch.
        assert graphs is None or width == cycle.num_rows
        eager = _Eager(self.draft_model_runner.attn_backend, batch.has_grammar, self._verify)
        self._draft_length.launched(bs, width)
        with cycle.verifying_eagerly():
            return cycle.run(forward_batch, inputs.block, in_shards, eager)

    def _end_cycle(self, batch: ScheduleBatch, step: Step, resolved: FallbackResult) -> GenerationBatchResult:
        if resolved.parts:
            self._metrics.clock.mark(VERIFIED)
            for index in resolved.parts:
                self._cycle.append_again(step, index)
            self._metrics.clock.mark(APPENDED)
        accepted, output = step.accepted, step.output
        self._metrics.end_cycle()
        self._tree_counts.end_cycle(step.settled.tree_counts)
        # The next replay overwrites them before the scheduler has read them.
        _, hidden_states = self._cycle.split_hidden_states(step.settled.hidden_states)
        output.hidden_states = hidden_states.clone() if batch.return_hidden_states else None
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=accepted.out_tokens.reshape(-1),
            accept_lens=accepted.accept_lens,
            new_seq_lens=accepted.new_seq_lens,
            next_draft_input=DFlashDraftInput(bonus_tokens=accepted.bonus_tokens, new_seq_lens=accepted.new_seq_lens),
            speculative_num_draft_tokens=accepted.out_tokens.shape[1],
            can_run_cuda_graph=step.is_replay,
            extra_keep_alive_refs=resolved.failures,
        )

    def _fill_blocks(self, batch: ScheduleBatch, inputs: CycleInputs, fallback: list[int]) -> None:
        """Write `[bonus, mask x (W - 1)]` of every request, and how the cycle chooses for it, into `inputs.padded`."""
        is_chain = None
        if self._cycle.verifies_trees and fallback:
            _log_chains()
            chains = set(fallback)
            is_chain = async_h2d([i in chains for i in range(len(batch.reqs))], dtype=torch.int64, device=self.device)
        ops.prepare_block(
            bonus_tokens=batch.spec_info.bonus_tokens,
            seq_lens=batch.seq_lens,
            req_pool_indices=batch.req_pool_indices,
            req_to_token=self.req_to_token_pool.req_to_token,
            mask_token_id=self._mask_token_id,
            parameters=self._sampler.draw_parameters(batch.sampling_info),
            seed=self._seeds.getrandbits(63),
            is_plain=not fallback,
            is_chain=is_chain,
            block=inputs.padded,
        )

    def _verify_batch(self, batch: ScheduleBatch, inputs: CycleInputs, width: int) -> ForwardBatch:
        """The TARGET_VERIFY batch of `width` rows a request, in the memory of `inputs`.

        `batch` serves as scratch: the scheduler restores it after this step (`Scheduler._forward_isolation`).
        """
        target_runner = self.target_worker.model_runner
        batch.input_ids, batch.out_cache_loc = inputs.input_ids, inputs.out_cache_loc
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        forget_prefill(batch)
        batch.seq_lens_cpu = host_kv_lens(batch, width)
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        if self._cycle.verifies_trees and target_runner.model_config.model_is_mrope:
            # SGLang makes other positions of them, to which the nodes' depths are added.
            inputs.positions.view(-1, width).copy_(inputs.block.seq_lens[:, None])
        batch.spec_info = DFlashVerifyInput(
            draft_token=inputs.input_ids,
            positions=inputs.positions,
            draft_token_num=width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        return ForwardBatch.init_new(
            batch,
            target_runner,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            return_hidden_states_before_norm=False,
        )

    def _verify(self, forward_batch: ForwardBatch, can_run_cuda_graph: bool = False) -> LogitsProcessorOutput:
        result = self.target_worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
        assert result.can_run_cuda_graph == can_run_cuda_graph
        return result.logits_output

    def _prefill(self, batch: ScheduleBatch, on_publish: Callable | None) -> GenerationBatchResult:
        """Prefill the target and append the prompt to the drafter's context, before the radix cache takes the slots."""
        self._sampler.prepare_prefill(batch)
        if self._states is not None:
            self._states.begin_prefill(batch)
        result = self.target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL, return_kv_loc_plan=True
        )
        result.extra_keep_alive_refs = self._sampler.begin_requests(batch, result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(batch.seq_lens)
        prefix_lens, extend_lens = (
            async_h2d(lens, dtype=torch.int32, device=self.device) for lens in (batch.prefix_lens, batch.extend_lens)
        )
        backend = self.target_worker.model_runner.prefill_attention_backend_str
        positions, _ = compute_position(backend, prefix_lens, extend_lens, sum(batch.extend_lens))
        plan, result.kv_loc_plan = result.kv_loc_plan, None
        if self._bigrams is not None:
            self._bigrams.begin(batch, extend_lens, result.next_token_ids)
        output = result.logits_output
        self._cycle.append_prompt(output, positions, plan)
        output.hidden_states = self._prompt_hidden_states(batch, output, extend_lens)
        result.next_draft_input = DFlashDraftInput(
            bonus_tokens=result.next_token_ids.to(torch.int64), new_seq_lens=batch.seq_lens
        )
        return result

    def _prompt_hidden_states(
        self, batch: ScheduleBatch, output: LogitsProcessorOutput, extend_lens: torch.Tensor
    ) -> torch.Tensor | None:
        """The target's last hidden states as the scheduler takes them (`_get_prefill_hidden_capture_mode`): of all T
        prefilled tokens, [T, H], or of each request's last one, [bs, H]; None where nobody asks.

        Args:
            output: of the prefill, with all that was captured, [T, F * H + H].
            extend_lens: [bs] int32, tokens of each request.
        """
        if not batch.return_hidden_states:
            return None
        _, hidden_states = self._cycle.split_hidden_states(output.hidden_states)
        mode = max(batch.return_hidden_states_mode, get_server_return_hidden_states_mode())
        return hidden_states[extend_lens.cumsum(0) - 1] if mode.is_last() else hidden_states

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

    # --- set-up, in the order in which the scheduler calls it ---------------------------------------------------------

    @property
    def draft_model_runner(self) -> ModelRunner:
        return self._draft_worker.model_runner

    @property
    def model_runner(self) -> ModelRunner:
        """The drafter's, which `/save_remote_model` looks for here."""
        return self.draft_model_runner

    def weight_update_runners(self) -> list[tuple[str, ModelRunner]]:
        return [("draft", self.draft_model_runner)]

    @property
    def spec_v2_attn_backends(self) -> tuple:
        """For those that ask, SGLang brings exact sequence lengths to the CPU, and each cycle waits for the last."""
        backends = [self.draft_model_runner.attn_backend]
        if not self._cycle.verifies_trees:
            backends.append(self.target_worker.model_runner.attn_backend)
        return tuple(backend for backend in backends if not is_planned_from_bounds(backend))

    def alloc_memory_pool(self, memory_pool_config=None, req_to_token_pool=None, token_to_kv_pool_allocator=None):
        """Give the drafter its own KV pool under the target's slots, and hook our work into the graphs to come."""
        target_runner = self.target_worker.model_runner
        window_size = get_spec().speculative_draft_window_size
        window = None
        if window_size is not None:
            window = DraftWindow(window_size, target_runner.page_size, self.block_size, req_to_token_pool)
        draft_pool = req_to_token_pool if window is None else window.pool
        super().alloc_memory_pool(memory_pool_config, draft_pool, token_to_kv_pool_allocator)
        self.req_to_token_pool = req_to_token_pool
        assert len(req_to_token_pool.req_to_token) <= self._sampler.num_slots
        check_pool(memory_pool_config, target_runner.page_size)
        check_window_pool(memory_pool_config, target_runner.sliding_window_size, target_runner.page_size)
        self._kv_memory = KVMemory.measure(target_runner.token_to_kv_pool, self.draft_model_runner.token_to_kv_pool)
        logger.info("%s", self._kv_memory)
        self._cycle_memory = CycleMemory.of(target_runner.kv_cache_configurator)
        self._states = RecurrentState.of(target_runner, self.block_size)
        if self._num_candidates > 1 and not self._asks_for_trees:
            self._verify_by_default(target_runner)
        arguments = (
            self.draft_model_runner,
            target_runner.model,
            self._head,
            self.block_size,
            window,
            self._states,
            self._metrics.clock,
        )
        if self._num_candidates == 1:
            self._cycle = DecodeCycle(*arguments)
            return
        self._cycle = TreeCycle(
            *arguments,
            num_nodes=get_spec().speculative_num_draft_tokens,
            num_candidates=self._num_candidates,
            bigrams=self._bigrams,
            counts_accepted=get_spec().speculative_adaptive or self._metrics.are_exported,
            attention=TreeAttentionBackend(target_runner),
        )

    def _verify_by_default(self, target_runner: ModelRunner) -> None:
        """Where nobody has said what is verified: trees, or chains of a target that has no trees."""
        obstacle = tree_obstacle(target_runner)
        if obstacle is None:
            num_nodes = get_spec().speculative_num_draft_tokens
            log_info_on_rank0(
                logger,
                f"Drafts are verified in trees of up to {num_nodes} nodes; --speculative-eagle-topk 1 verifies chains.",
            )
            return
        log_info_on_rank0(logger, f"Drafts are verified in chains, not in trees: {obstacle}.")
        self._num_candidates, self._bigrams = 1, None
        tp_group = get_parallel().tp_group
        self._head = DraftHead.of(self.draft_model_runner.model, target_runner.model.lm_head, tp_group, k=1)

    def init_attention_backends(self) -> None:
        # The drafter's are built for its blocks; the target's are there.
        with override_num_draft_tokens(self.block_size):
            super().init_attention_backends()
        target_runner = self.target_worker.model_runner
        self._cycle.begin_verification(target_runner)
        CycleGraphRunner.install(target_runner, self._cycle)

    def init_cuda_graphs(self) -> None:
        """The drafter has no graphs of its own: it runs inside those of the target, which are there by now."""
        runner = self.target_worker.model_runner.decode_cuda_graph_runner
        whole = runner if isinstance(runner, CycleGraphRunner) else None
        if whole is None and isinstance(runner, DecodeCudaGraphRunner):
            raise ConfigError(f"SGLang captured the target's forward in a {type(runner).__name__}, not DFLASH's cycle.")
        is_adaptive = get_spec().speculative_adaptive
        if is_adaptive and whole is None and self.device != "cpu":
            # Flags have been checked (`refusals.check_adaptive`), but SGLang leaves graphs out for other reasons too.
            raise ConfigError("--speculative-adaptive verifies in CUDA graphs, and SGLang captured none of the target.")
        cycles_per_choice = 1 if whole is None else CYCLES_PER_CHOICE
        # What is exported is exact. One rank does that, but all of them must learn the same at the same time.
        counted_every = 1 if get_observability().enable_metrics else cycles_per_choice
        self._tree_counts = TreeCounts(self._num_candidates, counted_every)
        num_rows = self._cycle.num_rows
        if self._cycle.verifies_trees:
            lengths = tree_lengths(num_rows)
            acceptance = TreeAcceptance(num_rows, self.block_size, cycles_per_choice)
        else:
            lengths, acceptance = chain_lengths(num_rows), ChainAcceptance(num_rows, cycles_per_choice)
        self._graphs = None if whole is None else CycleGraphs(whole, lengths[:-1] if is_adaptive else ())
        self._draft_length: DraftLengthController
        if not is_adaptive:
            self._draft_length = FixedLength(num_rows)
        elif self._graphs is None:
            self._draft_length = CpuController(lengths, acceptance)
        else:
            kv_bytes = self._kv_memory.target_bytes_per_token + self._kv_memory.drafter_bytes_per_token
            self._draft_length = GpuController(self._graphs, acceptance, kv_bytes)

    def describe(self) -> dict:
        """What `/server_info` shows."""
        return {
            "version": __version__,
            "worker": type(self).__name__,
            "block_size": self.block_size,
            "verified_rows": self._cycle.num_rows,
            "candidates_per_position": self._num_candidates,
            "draft_attention_backend": self.draft_model_runner.decode_attention_backend_str,
            "draft_window_size": get_spec().speculative_draft_window_size,
            # Of now: SGLang may shrink the pools once CUDA graphs have taken their memory.
            "kv_capacity_tokens": self.draft_model_runner.token_to_kv_pool.size,
            "kv_bytes_per_token": {
                "target": self._kv_memory.target_bytes_per_token,
                "drafter": self._kv_memory.drafter_bytes_per_token,
            },
            "cycle_bytes": asdict(self._cycle_memory)
            | {
                "penalties": self._sampler.penalty_bytes,
                "bigrams": 0 if self._bigrams is None else self._bigrams.nbytes,
            },
            "recurrent_states": None if self._states is None else self._states.describe(),
            **self._metrics.snapshot(),
        }

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """The scheduler has read the result of the oldest decode cycle that it had not."""
        in_trees = self._tree_counts.complete()
        length = self._draft_length.completed(num_correct_drafts_per_req, in_trees)
        self._metrics.complete(num_correct_drafts_per_req, length, in_trees.ranks if in_trees is not None else [])

    def update_drafter(self, path: str, load_format: str) -> tuple[bool, str]:
        """Take the drafter's weights from another checkpoint of the same shape."""
        success, message = self.draft_model_runner.weight_updater.update_weights_from_disk(path, load_format)
        if success:
            self._cycle.reload_weights()
        return success, message
