"""One CUDA graph per batch size for a whole decode cycle: draft, verify, accept, append.

The graph is SGLang's own of the target's TARGET_VERIFY forward, with the rest of `DecodeCycle.run` recorded around it.
The host then writes the next block's inputs, launches one replay, and is free to prepare the cycle after.

Shapes: P requests of a graph, W tokens of each block: B, or fewer with `--speculative-adaptive`. The target verifies W
rows of a request too, or the N of a tree.
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
from sglang.srt.runtime_context import get_context, get_parallel, get_spec
from sglang.srt.speculative.spec_utils import GrammarTree
from sglang.srt.utils.common import log_info_on_rank0

from sglang_dflash.attention.fa3 import shared_schedules
from sglang_dflash.attention.plan import BlockPlan, block_plan, bound_index_buffer, parts
from sglang_dflash.engine.cycle import CycleInputs, DecodeCycle, Settled, Step
from sglang_dflash.engine.relay import DFlashVerifyInput
from sglang_dflash.types import Block

logger = logging.getLogger(__name__)

# Graphs of draft lengths between the shortest tree or chain and the longest one are captured for batch sizes at which
# the longest takes more than this many times as long as the shortest. Elsewhere a GPU waits for weights at any length.
COMPUTE_BOUND_RATIO = 1.05
# Replays of each graph at start-up, of which the fastest counts.
TIMED_REPLAYS = 3

# SGLang's buffers of a graph that every target has: those in :class:`Block`, and others that it may leave unused.
_COMMON_BUFFERS = {"input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens", "seq_lens_cpu"}
_COMMON_BUFFERS |= {"mrope_positions", "global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu"}


@dataclass(frozen=True)
class _Graph:
    """What one graph holds, of P requests; the next replay of as many overwrites it.

    Attributes:
        batch: of its static buffers.
        drafts: [P, W] int64, pinned: the blocks, on the CPU before the target has verified them.
        has_drafted: recorded inside the graph, when they are.
        settled: by the target's plain tokens.
        layouts: of the attention backends, which may own memory that the graph reads.
    """

    batch: ForwardBatch
    drafts: torch.Tensor
    has_drafted: torch.cuda.Event
    settled: Settled
    layouts: tuple


@dataclass(frozen=True)
class _Recorded:
    """The :class:`sglang_dflash.engine.cycle.Forwards` of a cycle that is being recorded.

    Attributes:
        draft_backend, draft_plan: for blocks of W tokens; there is no plan for one token.
        target_plan: for what is verified.
        forward: the target's, as SGLang captures it.
        drafts: [P, W] int64, pinned, takes the blocks.
        has_drafted: external: the host waits for it while the rest of the graph runs.
    """

    draft_backend: AttentionBackend
    draft_plan: BlockPlan | None
    target_plan: BlockPlan
    forward: Callable[[ForwardBatch], LogitsProcessorOutput]
    drafts: torch.Tensor
    has_drafted: torch.cuda.Event

    def lay_out_draft(self, batch: ForwardBatch) -> None:
        self.draft_plan.record(batch)

    def send_drafts(self, block_tokens: torch.Tensor) -> None:
        self.drafts.copy_(block_tokens, non_blocking=True)
        self.has_drafted.record()

    def verify(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        self.target_plan.record(batch)
        return self.forward(batch)


@contextmanager
def override_num_draft_tokens(width: int) -> Iterator[None]:
    """Meanwhile attention backends are built for as many rows of a request."""
    original = get_spec().speculative_num_draft_tokens
    get_context().override("sglang_dflash", speculative_num_draft_tokens=width)
    try:
        yield
    finally:
        get_context().override("sglang_dflash", speculative_num_draft_tokens=original)


def _variant_label(in_shards: bool) -> str | None:
    return "in shards" if in_shards else None


class CycleGraphRunner(DecodeCudaGraphRunner):
    """Takes the place of the target's decode graph runner."""

    def __init__(
        self,
        model_runner: ModelRunner,
        cycle: DecodeCycle,
        width: int,
        attn_backend: AttentionBackend | None = None,
        draft_backend: AttentionBackend | None = None,
        min_bs: int = 1,
        whole: CycleGraphRunner | None = None,
    ) -> None:
        """
        Args:
            width: rows of a request that the target verifies.
            attn_backend, draft_backend: of the target and of the drafter, for so many; None: their own, for whole
                blocks.
            min_bs: of the batches that there is a graph for.
            whole: the runner of whole blocks, which this one is beside.
        """
        self.width, self._min_bs = width, min_bs
        # W.
        self._block_width = min(width, cycle.block_size)
        self._cycle = cycle
        target_backend = attn_backend or model_runner.attn_backend
        self.draft_backend = draft_backend or cycle.draft_runner.attn_backend
        self._target_plan = block_plan(target_backend, width)
        bound_index_buffer(target_backend, whole and whole.attn_backend)
        self._draft_plan = None
        # One row has no drafts.
        if self._block_width > 1:
            self._draft_plan = block_plan(self.draft_backend, self._block_width)
            bound_index_buffer(self.draft_backend, whole and whole.draft_backend)
            # A drafter's backends plan on the GPU alone (`backends.DRAFT_BACKENDS`).
            assert not self._draft_plan.needs_host_lens
        # By batch size P: see `_Graph.drafts`.
        self._drafts: dict[int, torch.Tensor] = {}
        # By batch size, and whether the target's logits stay in their shards.
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        # By batch size: slicing anew is a twentieth of what a cycle costs the host.
        self._inputs: dict[int, CycleInputs] = {}
        self._in_shards = False
        self._variants = [False]
        # A backend that is prepared before every replay knows one graph of each size.
        if cycle.logits.have_shards and not self._target_plan.needs_host_lens:
            self._variants.append(True)
        super().__init__(model_runner, attn_backend=attn_backend, speculative_num_draft_tokens=width)
        # Others that the model has, such as the token count of expert parallelism.
        self._has_more_inputs = bool(set(self.buffer_registry.slot_names()) - _COMMON_BUFFERS)

    @classmethod
    def install(cls, target_runner: ModelRunner, cycle: DecodeCycle) -> None:
        """Make a target, which has its KV pools and no graphs yet, capture whole cycles."""
        bound = partial(cls, cycle=cycle, width=cycle.num_rows, attn_backend=cycle.verify_backend())
        # SGLang asks the class for this before it makes a runner.
        bound.decode_graph_gather_requirements = cls.decode_graph_gather_requirements
        # SGLang takes the class from this method, "to install specialized decode graph runners".
        target_runner._decode_cuda_graph_runner_cls = lambda: bound
        # Float32 logits of all verified tokens would have room here, which nobody writes (`verify.logits`); prefills
        # use it for one per request.
        max_rows = target_runner.max_shared_logits_buffer_rows
        target_runner.max_shared_logits_buffer_rows = lambda: max_rows() // cycle.num_rows

    def narrower(self, width: int, min_bs: int) -> CycleGraphRunner:
        """Capture the same cycles, of batches from `min_bs` on, with `width` rows of a request."""
        cycle, draft_backend = self._cycle, self.draft_backend
        with override_num_draft_tokens(width):
            attn_backend = cycle.verify_backend() or self.model_runner._get_attention_backend()
        block_width = min(width, cycle.block_size)
        if block_width > 1:
            with override_num_draft_tokens(block_width):
                draft_backend = cycle.draft_runner._get_attention_backend()
        return type(self)(self.model_runner, cycle, width, attn_backend, draft_backend, min_bs, whole=self)

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

    def _next_token_logits_buffer_capacity_rows(self, max_num_tokens: int) -> int:
        return self.max_bs

    # --- capture ----------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        buffers = self.buffers
        rows = (buffers.input_ids, buffers.positions, buffers.out_cache_loc)
        num_tokens = self.max_bs * self._block_width
        if self._cycle.verifies_trees:
            # The target's are written when the drafter has run.
            rows = [torch.zeros_like(tensor[:num_tokens]) for tensor in rows]
        # Greedy while graphs are captured.
        self._block = Block.of(*rows, buffers.req_pool_indices[: self.max_bs], buffers.seq_lens[: self.max_bs])
        if self._draft_plan is not None:
            # SGLang has given its own backend its buffers by now.
            self.draft_backend.init_cuda_graph_state(self.max_bs, num_tokens)
        self.capture_bs = [bs for bs in self.capture_bs if bs >= self._min_bs]
        super().capture()

    def get_spec_info(self, num_tokens: int) -> DFlashVerifyInput:
        """Of the captured batches. Blocks are causal chains, so no backend needs a mask; trees have ours."""
        return DFlashVerifyInput(
            draft_token=None,
            positions=None,
            draft_token_num=self.width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )

    def capture_prepare(self, *args, **kwargs):
        prepared = super().capture_prepare(*args, **kwargs)
        batch = prepared[0]
        block = self._block.take(batch.batch_size, self._block_width)
        if self._draft_plan is not None:
            self._draft_plan.capture(self._cycle.draft_batch(batch, block))
        if batch.batch_size not in self._drafts:
            # Pinned memory cannot be allocated during a capture.
            shape = (batch.batch_size, self._block_width)
            self._drafts[batch.batch_size] = torch.empty(shape, dtype=torch.int64, pin_memory=True)
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
        bs = batch.batch_size
        recorded = _Recorded(
            draft_backend=self.draft_backend,
            draft_plan=self._draft_plan,
            target_plan=self._target_plan,
            forward=lambda batch: forward(input_ids, positions, batch, **kwargs),
            drafts=self._drafts[bs],
            has_drafted=torch.cuda.Event(external=True),
        )
        step = self._cycle.run(batch, self._block.take(bs, self._block_width), in_shards, recorded)
        backends = [*parts(self.attn_backend), *([] if self._draft_plan is None else [self.draft_backend])]
        # The next variant of this size gets new ones.
        layouts = tuple(backend.forward_metadata for backend in backends) if len(self._variants) > 1 else ()
        # Not for CPUs, where this module is imported too.
        from sglang.srt.model_executor.runner_backend_utils.weak_ref_tensor import weak_ref_tensor

        # What takes most of the memory is read right after a replay, if at all: the next graph is captured in it.
        output = replace(
            step.output,
            next_token_logits=weak_ref_tensor(step.output.next_token_logits),
            hidden_states=weak_ref_tensor(step.output.hidden_states),
        )
        settled = replace(step.settled, hidden_states=weak_ref_tensor(step.settled.hidden_states))
        # Kept from the last run, which is the captured one: its memory is what a replay fills.
        self._graphs[bs, in_shards] = _Graph(batch, recorded.drafts, recorded.has_drafted, settled, layouts)
        return output

    # --- replay -----------------------------------------------------------------------------------------------------

    def inputs(self, bs: int) -> CycleInputs | None:
        """The buffers of the graph for a batch size; None: there is no such graph."""
        if not self.has(bs):
            return None
        if bs not in self._inputs:
            blocks = (self._block.take(size, self._block_width) for size in (self.padded(bs), bs))
            rows = slice(bs * self.width)
            buffers = self.buffers
            self._inputs[bs] = CycleInputs(
                *blocks, buffers.input_ids[rows], buffers.positions[rows], buffers.out_cache_loc[rows]
            )
        return self._inputs[bs]

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
            self.backend.replay(self._make_graph_key(bs), self._graphs[bs, False].batch)
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
            batch = self._graphs[padded_bs, False].batch
            self._target_plan.before_replay(replace(batch, seq_lens_cpu=kv_lens, seq_lens_sum=int(kv_lens.sum())))
        self.raw_bs, self.raw_num_token, self.bs = bs, num_tokens, padded_bs
        self._replay_graph_key = self._make_graph_key(padded_bs, variant_label=_variant_label(self._in_shards))

    def _resolve_shared_read_ends(self, attn_backend: AttentionBackend, forward_mode: ForwardMode) -> SharedReadEnds:
        """When the scheduler may change `req_to_token` again, which the whole graph reads."""
        return SharedReadEnds.POST_REPLAY

    def step(self, batch: ForwardBatch, output: LogitsProcessorOutput, has_grammar: bool) -> Step:
        """What the last replay has done for `batch`: the decision in memory of its own, the rest in the graph's."""
        graph, bs = self._graphs[self.bs, self._in_shards], self.raw_bs
        drafts = None
        if has_grammar:
            drafts = GrammarTree(GrammarTree.from_linear_chain(graph.drafts[:bs]).resolve(), graph.has_drafted)
        return Step(batch, output, graph.settled.take(bs), drafts, is_replay=True)


class CycleGraphs:
    """The runners of every width.

    Attributes:
        lengths: the draft lengths that there are graphs for, ascending.
    """

    def __init__(self, whole: CycleGraphRunner, narrow_widths: tuple[int, ...]) -> None:
        """Capture the other widths beside `whole`, and time them all.

        Args:
            narrow_widths: ascending; the first is of plain decoding. Of the others, the narrowest is captured for all
                batches, and those between it and `whole` for batches whose cycles they may make shorter.
        """
        self._whole, self._runners = whole, {whole.width: whole}
        self._seconds: dict[tuple[int, int], float] = {}
        if narrow_widths:
            few, between = narrow_widths[:2], narrow_widths[2:]
            self._runners |= {width: whole.narrower(width, min_bs=1) for width in few}
            self._seconds = self._time()
            slow = [
                bs
                for bs in whole.capture_bs
                if self._seconds[bs, whole.width] > COMPUTE_BOUND_RATIO * self._seconds[bs, few[-1]]
            ]
            if slow and between:
                # Batches between two sizes are padded to the larger one.
                min_bs = max((bs for bs in whole.capture_bs if bs < slow[0]), default=0) + 1
                self._runners |= {width: whole.narrower(width, min_bs) for width in between}
                self._seconds = self._time()
            ms = {key: round(1e3 * seconds, 2) for key, seconds in sorted(self._seconds.items())}
            log_info_on_rank0(logger, f"A cycle's ms by batch size and rows of a request: {ms}")
        self.lengths = tuple(sorted(self._runners))

    def __getitem__(self, width: int) -> CycleGraphRunner:
        return self._runners[width]

    def padded(self, bs: int) -> int:
        """The batch size of the graphs for so many requests; where there is none, their own."""
        return self._whole.padded(bs) if self._whole.has(bs) else bs

    def cost(self, padded_bs: int, width: int) -> float:
        """What a cycle takes, in seconds; inf where there is no graph."""
        return self._seconds.get((padded_bs, width), math.inf)

    def _time(self) -> dict[tuple[int, int], float]:
        """What a cycle of each size and width takes.

        Widths of a size are timed right after each other, again and again: what else slows a GPU at start-up, another
        server's or its own clock, must not make one of them look better than another.
        """
        turns = [(bs, runner) for bs in self._whole.capture_bs for runner in self._runners.values() if runner.has(bs)]
        seconds = dict.fromkeys(((bs, runner.width) for bs, runner in turns), math.inf)
        for bs, runner in turns * TIMED_REPLAYS:
            seconds[bs, runner.width] = min(seconds[bs, runner.width], runner.seconds(bs))
        # Every rank chooses by the same times, as it must by the same rule.
        return get_parallel().tp_group.broadcast_object(seconds, src=0)
