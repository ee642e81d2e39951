"""One CUDA graph per batch size for a whole decode cycle: draft, verify, accept, append.

The graph is SGLang's own of the target's TARGET_VERIFY forward, with our steps recorded before and behind it. The host
then writes the next block's inputs, launches one replay, and is free to prepare the cycle after.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.speculative.spec_utils import GrammarTree

from sglang_dflash.accept import Acceptance
from sglang_dflash.block_plan import block_plan
from sglang_dflash.cycle import DecodeCycle
from sglang_dflash.fa3_blocks import shared_schedules
from sglang_dflash.info import DFlashVerifyInput
from sglang_dflash.metrics import APPENDED, BEGUN, DRAFTED, VERIFIED, CycleClock
from sglang_dflash.reference.prepare_block import Block
from sglang_dflash.reference.sample_rows import DrawParameters

# SGLang's buffers of a graph that every target has: those in :class:`Block`, and others that it may leave unused.
_COMMON_BUFFERS = {"input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens", "seq_lens_cpu"}
_COMMON_BUFFERS |= {"mrope_positions", "global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu"}


@dataclass(frozen=True)
class _Captured:
    """What a graph leaves behind; the next replay of its size overwrites it.

    Attributes:
        batch: of the graph's static buffers.
        has_drafted: recorded inside the graph, when the block is on the CPU, before the target has verified it.
        accepted: by the target's plain tokens (`DecodeCycle.accept_plain`); the drafter's context has these rows.
        layouts: of the attention backends, which may own memory that the graph reads.
    """

    batch: ForwardBatch
    has_drafted: torch.cuda.Event
    accepted: Acceptance
    layouts: tuple


def _variant_label(in_shards: bool) -> str | None:
    return "in shards" if in_shards else None


class CycleGraphRunner(DecodeCudaGraphRunner):
    """Takes the place of the target's decode graph runner."""

    def __init__(self, model_runner: ModelRunner, cycle: DecodeCycle, clock: CycleClock) -> None:
        self._cycle, self._clock = cycle, clock
        self._target_plan = block_plan(model_runner.attn_backend, cycle.block_size)
        self._draft_plan = block_plan(cycle.draft_backend, cycle.block_size)
        # A drafter's backends plan on the GPU alone (`arguments.DRAFT_BACKENDS`).
        assert not self._draft_plan.needs_host_lens
        # By batch size P: [P, B] int64, pinned, the drafted block.
        self._drafted: dict[int, torch.Tensor] = {}
        # By batch size, and whether the target's logits stay in their shards.
        self._captured: dict[tuple[int, bool], _Captured] = {}
        self._in_shards = False
        self._variants = [False]
        # A backend that is prepared before every replay knows one graph of each size.
        if cycle.logits.have_shards and not self._target_plan.needs_host_lens:
            self._variants.append(True)
        super().__init__(model_runner)
        # Others that the model has, such as the token count of expert parallelism.
        self._has_more_inputs = bool(set(self.buffer_registry.slot_names()) - _COMMON_BUFFERS)

    @classmethod
    def install(cls, target_runner: ModelRunner, cycle: DecodeCycle, clock: CycleClock) -> None:
        """Make a target, which has its KV pools and no graphs yet, capture whole cycles."""
        # SGLang takes the class from this method, "to install specialized decode graph runners".
        target_runner._decode_cuda_graph_runner_cls = lambda: partial(cls, cycle=cycle, clock=clock)

    # --- capture ----------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        # Of the requests of the largest graph; greedy while graphs are captured.
        self._parameters = DrawParameters.greedy(self.max_bs, self.device)
        self._seed = torch.zeros(1, dtype=torch.int64, device=self.device)
        # SGLang has given its own backend its buffers by now.
        self._cycle.draft_backend.init_cuda_graph_state(self.max_bs, self.max_num_token)
        super().capture()

    def get_spec_info(self, num_tokens: int) -> DFlashVerifyInput:
        """Of the captured batches; blocks are causal chains, so no backend needs a mask."""
        return DFlashVerifyInput(
            draft_token=None,
            positions=None,
            draft_token_num=self._cycle.block_size,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )

    def capture_prepare(self, *args, **kwargs):
        prepared = super().capture_prepare(*args, **kwargs)
        batch = prepared[0]
        self._draft_plan.capture(self._cycle.draft_batch(batch))
        if batch.batch_size not in self._drafted:
            # Pinned memory cannot be allocated during a capture.
            shape = (batch.batch_size, self._cycle.block_size)
            self._drafted[batch.batch_size] = torch.empty(shape, dtype=torch.int64, pin_memory=True)
        return prepared

    def capture_one_shape(
        self, size: int, forward: Callable, stream_idx: int | None = None, variant_label: str | None = None
    ) -> None:
        # SGLang has variants for LoRA, which is refused.
        assert variant_label is None
        for in_shards in self._variants:
            recorded = partial(self._forward, forward, in_shards)
            super().capture_one_shape(size, recorded, stream_idx, _variant_label(in_shards))

    @shared_schedules()
    def _forward(
        self,
        forward: Callable,
        in_shards: bool,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: ForwardBatch,
        **kwargs,
    ) -> LogitsProcessorOutput:
        """In place of the target's forward: run for warm-up, and once more while the graph is being captured."""
        cycle, clock = self._cycle, self._clock
        clock.mark(BEGUN)
        block = cycle.draft(batch, self._draft_plan.record)
        self._drafted[batch.batch_size].copy_(block, non_blocking=True)
        # External: the host waits for it while the rest of the graph runs.
        has_drafted = torch.cuda.Event(external=True)
        has_drafted.record()
        clock.mark(DRAFTED)
        self._target_plan.record(batch)
        with cycle.logits.in_shards() if in_shards else nullcontext():
            output = forward(input_ids, positions, batch, **kwargs)
        accepted = cycle.accept_plain(batch, output, self.block(batch.batch_size), in_shards)
        clock.mark(VERIFIED)
        cycle.append(batch, output, accepted)
        clock.mark(APPENDED)
        # Kept from the last run, which is the captured one: its memory is what a replay fills.
        backends = (self.attn_backend, cycle.draft_backend)
        # The next variant of this size gets new ones.
        layouts = tuple(backend.forward_metadata for backend in backends) if len(self._variants) > 1 else ()
        self._captured[batch.batch_size, in_shards] = _Captured(batch, has_drafted, accepted, layouts)
        return output

    # --- replay -----------------------------------------------------------------------------------------------------

    def choose(self, in_shards: bool) -> None:
        """From now on, replay graphs that leave the target's logits in their shards, where there are such, or not."""
        self._in_shards = in_shards in self._variants and in_shards

    def block(self, bs: int) -> Block | None:
        """The buffers of the graph for a batch size, padded to it; None: no graph is that large."""
        if bs > self.max_bs:
            return None
        buffers = self.buffers
        block = Block(
            buffers.input_ids,
            buffers.positions,
            buffers.out_cache_loc,
            buffers.req_pool_indices,
            buffers.seq_lens,
            self._parameters,
            self._seed,
        )
        return block.take(self._pad_to_bucket(bs, self.capture_bs), self._cycle.block_size)

    def load_batch(self, forward_batch: ForwardBatch, pp_proxy_tensors=None) -> None:
        """Prepare a replay for a batch whose inputs are in the buffers of `block` already."""
        bs = forward_batch.batch_size
        padded_bs = self._pad_to_bucket(bs, self.capture_bs)
        num_tokens, padded_num_tokens = (size * self._cycle.block_size for size in (bs, padded_bs))
        self._validate_capture_hidden_mode(forward_batch)
        self.deepep_adapter.replay()
        if self._has_more_inputs or forward_batch.mrope_positions is not None:
            self.buffer_registry.fill_from(
                forward_batch,
                raw_bs=bs,
                padded_bs=padded_bs,
                raw_num_tokens=num_tokens,
                padded_num_tokens=padded_num_tokens,
            )
        if self._target_plan.needs_host_lens:
            # Padded requests have one token.
            padding = torch.full((padded_bs - bs,), 1 + self._cycle.block_size)
            kv_lens = torch.cat((forward_batch.seq_lens_cpu.to(torch.int64), padding))
            batch = self._captured[padded_bs, False].batch
            self._target_plan.before_replay(replace(batch, seq_lens_cpu=kv_lens, seq_lens_sum=int(kv_lens.sum())))
        self.raw_bs, self.raw_num_token, self.bs = bs, num_tokens, padded_bs
        self._replay_graph_key = self._make_graph_key(padded_bs, variant_label=_variant_label(self._in_shards))

    def execute(self, forward_batch: ForwardBatch, pp_proxy_tensors=None) -> LogitsProcessorOutput:
        output = super().execute(forward_batch, pp_proxy_tensors)
        # The graph reads `req_to_token`, which the scheduler may change once this event has passed.
        read_done = torch.cuda.Event()
        read_done.record()
        self.model_runner.war_fastpath_read_done_event = read_done
        return output

    def accepted(self) -> Acceptance:
        """What the last replay accepted, in memory of its own."""
        return self._captured[self.bs, self._in_shards].accepted.take(self.raw_bs)

    def grammar_tree(self) -> GrammarTree:
        """The block of the last replay, which the CPU can read before the target has verified it."""
        tree = GrammarTree.from_linear_chain(self._drafted[self.bs][: self.raw_bs])
        return GrammarTree(tree.resolve(), self._captured[self.bs, self._in_shards].has_drafted)
