"""One CUDA graph per batch size for a whole decode cycle: draft, verify, accept, append.

The graph is SGLang's own of the target's TARGET_VERIFY forward, with our steps recorded before and behind it. The host
then writes the next block's inputs, launches one replay, and is free to prepare the cycle after.

Shapes: P requests of a graph, W rows of each block: B, or fewer with `--speculative-adaptive`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.spec_utils import GrammarTree
from sglang.srt.utils.common import log_info_on_rank0

from sglang_dflash.accept import Acceptance
from sglang_dflash.block_plan import block_plan
from sglang_dflash.cycle import DecodeCycle
from sglang_dflash.fa3_blocks import shared_schedules
from sglang_dflash.info import DFlashVerifyInput
from sglang_dflash.metrics import APPENDED, BEGUN, DRAFTED, VERIFIED, CycleClock
from sglang_dflash.reference.prepare_block import Block
from sglang_dflash.reference.sample_rows import DrawParameters

logger = logging.getLogger(__name__)

# SGLang's buffers of a graph that every target has: those in :class:`Block`, and others that it may leave unused.
_COMMON_BUFFERS = {"input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens", "seq_lens_cpu"}
_COMMON_BUFFERS |= {"mrope_positions", "global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu"}

# Blocks of fewer rows are for batches whose cycles take so many times as long as the shortest: smaller ones wait for
# weights, however many rows there are.
BUSY = 1.05
_TIMED_REPLAYS = 3


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


@dataclass(frozen=True)
class GraphBlocks:
    """Views of a graph's buffers for bs requests, kept: slicing anew is a twentieth of what a cycle costs the host.

    Attributes:
        padded: blocks of as many requests as the graph has.
        block: of the bs requests.
    """

    padded: Block
    block: Block


def _variant_label(in_shards: bool) -> str | None:
    return "in shards" if in_shards else None


class CycleGraphRunner(DecodeCudaGraphRunner):
    """Takes the place of the target's decode graph runner."""

    def __init__(
        self,
        model_runner: ModelRunner,
        cycle: DecodeCycle,
        clock: CycleClock,
        width: int,
        attn_backend: AttentionBackend | None = None,
        draft_backend: AttentionBackend | None = None,
        min_bs: int = 1,
    ) -> None:
        """
        Args:
            width: W.
            attn_backend, draft_backend: of the target and of the drafter, for blocks of W rows; None: their own, for
                whole blocks.
            min_bs: of the batches that are captured.
        """
        self.width, self._min_bs = width, min_bs
        self._cycle, self._clock = cycle, clock
        self._draft_backend = draft_backend or cycle.draft_runner.attn_backend
        self._target_plan = block_plan(attn_backend or model_runner.attn_backend, width)
        self._draft_plan = block_plan(self._draft_backend, width)
        # A drafter's backends plan on the GPU alone (`arguments.DRAFT_BACKENDS`).
        assert not self._draft_plan.needs_host_lens
        # By batch size P: [P, W] int64, pinned, the drafted blocks.
        self._drafted: dict[int, torch.Tensor] = {}
        # By batch size, and whether the target's logits stay in their shards.
        self._captured: dict[tuple[int, bool], _Captured] = {}
        self._blocks: dict[int, GraphBlocks] = {}
        self._in_shards = False
        self._variants = [False]
        # A backend that is prepared before every replay knows one graph of each size.
        if cycle.logits.have_shards and not self._target_plan.needs_host_lens:
            self._variants.append(True)
        super().__init__(model_runner, attn_backend=attn_backend, speculative_num_draft_tokens=width)
        # Others that the model has, such as the token count of expert parallelism.
        self._has_more_inputs = bool(set(self.buffer_registry.slot_names()) - _COMMON_BUFFERS)

    @classmethod
    def install(cls, target_runner: ModelRunner, cycle: DecodeCycle, clock: CycleClock) -> None:
        """Make a target, which has its KV pools and no graphs yet, capture whole cycles."""
        bound = partial(cls, cycle=cycle, clock=clock, width=cycle.block_size)
        # SGLang asks the class for this before it makes a runner.
        bound.decode_graph_gather_requirements = cls.decode_graph_gather_requirements
        # SGLang takes the class from this method, "to install specialized decode graph runners".
        target_runner._decode_cuda_graph_runner_cls = lambda: bound

    def narrower(self, width: int, min_bs: int) -> CycleGraphRunner:
        """Capture the same cycles, of batches from `min_bs` on, with blocks of `width` rows."""
        # What backends are built for.
        get_context().override("sglang_dflash", speculative_num_draft_tokens=width)
        try:
            runners = (self.model_runner, self._cycle.draft_runner)
            backends = (runner._get_attention_backend() for runner in runners)
            return type(self)(self.model_runner, self._cycle, self._clock, width, *backends, min_bs)
        finally:
            get_context().override("sglang_dflash", speculative_num_draft_tokens=self.width)

    @contextmanager
    def serving(self, in_shards: bool) -> Iterator[None]:
        """Meanwhile the target's forward goes through this runner and its backend, and leaves logits in their shards
        where it is asked to and can."""
        self._in_shards = in_shards and True in self._variants
        runner = self.model_runner
        others = runner.attn_backend, runner.decode_cuda_graph_runner
        runner.attn_backend, runner.decode_cuda_graph_runner = self.attn_backend, self
        try:
            yield
        finally:
            runner.attn_backend, runner.decode_cuda_graph_runner = others

    # --- capture ----------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        buffers = self.buffers
        self._block = Block(
            buffers.input_ids,
            buffers.positions,
            buffers.out_cache_loc,
            buffers.req_pool_indices,
            buffers.seq_lens,
            # Of the requests of the largest graph; greedy while graphs are captured.
            DrawParameters.greedy(self.max_bs, self.device),
            torch.zeros(1, dtype=torch.int64, device=self.device),
        )
        # SGLang has given its own backend its buffers by now.
        self._draft_backend.init_cuda_graph_state(self.max_bs, self.max_num_token)
        self.capture_bs = [bs for bs in self.capture_bs if bs >= self._min_bs]
        super().capture()

    def get_spec_info(self, num_tokens: int) -> DFlashVerifyInput:
        """Of the captured batches; blocks are causal chains, so no backend needs a mask."""
        return DFlashVerifyInput(
            draft_token=None,
            positions=None,
            draft_token_num=self.width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )

    def capture_prepare(self, *args, **kwargs):
        prepared = super().capture_prepare(*args, **kwargs)
        batch = prepared[0]
        self._draft_plan.capture(self._cycle.draft_batch(batch, batch.seq_lens_cpu))
        if batch.batch_size not in self._drafted:
            # Pinned memory cannot be allocated during a capture.
            shape = (batch.batch_size, self.width)
            self._drafted[batch.batch_size] = torch.empty(shape, dtype=torch.int64, pin_memory=True)
        return prepared

    def capture_one_shape(
        self,
        size: int,
        forward: Callable,
        stream_idx: int | None = None,
        variant_label: str | None = None,
        attention_variant: str | None = None,
    ) -> None:
        # SGLang has variants for LoRA and for architectures that are refused.
        assert variant_label is None
        assert attention_variant is None
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
        drafted = cycle.draft(batch, batch.seq_lens_cpu, self._draft_backend, self._draft_plan.record)
        self._drafted[batch.batch_size].copy_(drafted, non_blocking=True)
        # External: the host waits for it while the rest of the graph runs.
        has_drafted = torch.cuda.Event(external=True)
        has_drafted.record()
        clock.mark(DRAFTED)
        self._target_plan.record(batch)
        with cycle.logits.in_shards(in_shards):
            output = forward(input_ids, positions, batch, **kwargs)
        block = self._block.take(batch.batch_size, self.width)
        accepted = cycle.accept_plain(batch, output, block, in_shards)
        clock.mark(VERIFIED)
        cycle.append(batch, output, accepted)
        clock.mark(APPENDED)
        # Kept from the last run, which is the captured one: its memory is what a replay fills.
        backends = (self.attn_backend, self._draft_backend)
        # The next variant of this size gets new ones.
        layouts = tuple(backend.forward_metadata for backend in backends) if len(self._variants) > 1 else ()
        self._captured[batch.batch_size, in_shards] = _Captured(batch, has_drafted, accepted, layouts)
        return output

    # --- replay -----------------------------------------------------------------------------------------------------

    def blocks(self, bs: int) -> GraphBlocks | None:
        """The buffers of the graph for a batch size; None: there is no such graph."""
        if not self.has(bs):
            return None
        if bs not in self._blocks:
            sizes = (self.padded(bs), bs)
            self._blocks[bs] = GraphBlocks(*(self._block.take(size, self.width) for size in sizes))
        return self._blocks[bs]

    def has(self, bs: int) -> bool:
        """Whether there is a graph for a batch size."""
        if self.disable_padding:
            return bs in self.capture_bs
        return self._min_bs <= bs <= self.max_bs

    def padded(self, bs: int) -> int:
        """The batch size of that graph."""
        return self._pad_to_bucket(bs, self.capture_bs)

    def seconds(self, bs: int) -> float:
        """What a replay takes, of requests without a context."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self.backend.replay_session():
            begin.record()
            self.backend.replay(self._make_graph_key(bs), self._captured[bs, False].batch)
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def load_batch(self, forward_batch: ForwardBatch, pp_proxy_tensors=None) -> None:
        """Prepare a replay for a batch whose inputs are in the buffers of `block` already."""
        bs = forward_batch.batch_size
        padded_bs = self.padded(bs)
        num_tokens, padded_num_tokens = (size * self.width for size in (bs, padded_bs))
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
            padding = torch.full((padded_bs - bs,), 1 + self.width)
            kv_lens = torch.cat((forward_batch.seq_lens_cpu.to(torch.int64), padding))
            batch = self._captured[padded_bs, False].batch
            self._target_plan.before_replay(replace(batch, seq_lens_cpu=kv_lens, seq_lens_sum=int(kv_lens.sum())))
        self.raw_bs, self.raw_num_token, self.bs = bs, num_tokens, padded_bs
        self._replay_graph_key = self._make_graph_key(padded_bs, variant_label=_variant_label(self._in_shards))

    def _resolve_shared_read_ends(self, attn_backend: AttentionBackend, forward_mode: ForwardMode) -> SharedReadEnds:
        """When the scheduler may change `req_to_token` again, which the whole graph reads."""
        return SharedReadEnds.POST_REPLAY

    def accepted(self) -> Acceptance:
        """What the last replay accepted, in memory of its own."""
        return self._captured[self.bs, self._in_shards].accepted.take(self.raw_bs)

    def grammar_tree(self) -> GrammarTree:
        """The block of the last replay, which the CPU can read before the target has verified it."""
        tree = GrammarTree.from_linear_chain(self._drafted[self.bs][: self.raw_bs])
        return GrammarTree(tree.resolve(), self._captured[self.bs, self._in_shards].has_drafted)


class CycleGraphs:
    """The runners of every width.

    Attributes:
        widths: ascending; the last is a whole block.
    """

    def __init__(self, whole: CycleGraphRunner, narrow_widths: tuple[int, ...]) -> None:
        """Capture the other widths beside `whole`, for batches that keep a GPU computing, and time them all."""
        self._whole, self._runners = whole, {whole.width: whole}
        self._seconds: dict[tuple[int, int], float] = {}
        if narrow_widths:
            self._seconds = self._time()
            sizes = [bs for bs in whole.capture_bs if self._seconds[bs, whole.width] > BUSY * self.least_seconds]
            if sizes:
                self._runners |= {width: whole.narrower(width, min_bs=sizes[0]) for width in narrow_widths}
                self._seconds = self._time()
            ms = {key: round(1e3 * seconds, 2) for key, seconds in sorted(self._seconds.items())}
            log_info_on_rank0(logger, f"A cycle's ms by batch size and rows of a block: {ms}")
        self.widths = tuple(sorted(self._runners))

    @property
    def least_seconds(self) -> float:
        """Of the cycles that were timed: about as long as the weights take to be read."""
        return min(self._seconds.values())

    def __getitem__(self, width: int) -> CycleGraphRunner:
        return self._runners[width]

    def cost(self, bs: int, width: int) -> float:
        """What a cycle takes, in seconds. Where there is no graph, blocks are whole."""
        runner = self._runners[width]
        if not runner.has(bs):
            return 1.0 if runner is self._whole else math.inf
        return self._seconds[runner.padded(bs), width]

    def _time(self) -> dict[tuple[int, int], float]:
        """What a cycle of each size and width takes.

        Widths of a size are timed right after each other, again and again: what else slows a GPU at start-up, another
        server's or its own clock, must not make one of them look better than another.
        """
        turns = [(bs, runner) for bs in self._whole.capture_bs for runner in self._runners.values() if runner.has(bs)]
        seconds = dict.fromkeys(((bs, runner.width) for bs, runner in turns), math.inf)
        for bs, runner in turns * _TIMED_REPLAYS:
            seconds[bs, runner.width] = min(seconds[bs, runner.width], runner.seconds(bs))
        # Every rank chooses by the same times, as it must by the same rule.
        return get_parallel().tp_group.broadcast_object(seconds, src=0)
