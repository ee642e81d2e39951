"""One CUDA graph per batch size for a whole decode cycle: draft, verify, accept, append.

The graph is SGLang's own of the target's TARGET_VERIFY forward, with the rest of `DecodeCycle.run` captured around it.
The host writes the next block's inputs, launches one replay, and is free to prepare the next cycle.

Shapes as in :mod:`sglang_dflash.types`: P requests of a graph, B block size, W draft length, N verified tokens of a
request.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_parallel, max_speculative_num_draft_tokens
from sglang.srt.speculative.spec_utils import GrammarTree
from sglang.srt.utils.common import log_info_on_rank0

from sglang_dflash.attention.fa3 import shared_schedules
from sglang_dflash.attention.plan import block_plan, bound_index_buffer, parts
from sglang_dflash.attention.verify_input import DFlashVerifyInput
from sglang_dflash.engine.adaptive.graph_sizes import graph_sizes
from sglang_dflash.engine.backends import build_backend
from sglang_dflash.engine.cycle import CycleInputs, DecodeCycle
from sglang_dflash.engine.executor import CapturingExecutor
from sglang_dflash.types import Block
from sglang_dflash.verify.output import CycleOutput, Verified

logger = logging.getLogger(__name__)

# Replays of each graph at start-up, of which the fastest counts.
TIMED_REPLAYS = 3

# SGLang's buffers of a graph that every target has: those in :class:`Block`, and others that may be unused.
_COMMON_BUFFERS = {"input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens", "seq_lens_cpu"}
_COMMON_BUFFERS |= {"mrope_positions", "global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu"}


@dataclass(frozen=True)
class _Graph:
    """Results of one graph of P requests. The next replay for P requests overwrites them.

    Attributes:
        batch: its static buffers.
        drafts: [P, W] int64, pinned. The blocks, on the CPU before the target has verified them.
        has_drafted: event recorded inside the graph, when `drafts` is complete.
        verified: what the fast path accepted.
        metadata: of the attention backends, which may own memory that the graph reads.
    """

    batch: ForwardBatch
    drafts: torch.Tensor
    has_drafted: torch.cuda.Event
    verified: Verified
    metadata: tuple


def _variant_label(is_greedy: bool) -> str | None:
    return "greedy" if is_greedy else None


class CycleGraphRunner(DecodeCudaGraphRunner):
    """Graphs of whole cycles with one N, in place of the target's decode graph runner.

    Attributes:
        num_tokens: N.
        draft_backend: the drafter's attention in these graphs.
    """

    def __init__(
        self,
        model_runner: ModelRunner,
        cycle: DecodeCycle,
        num_tokens: int,
        attn_backend: AttentionBackend | None = None,
        draft_backend: AttentionBackend | None = None,
        sizes: Sequence[int] | None = None,
        common: CycleGraphRunner | None = None,
    ) -> None:
        """
        Args:
            model_runner: the target's.
            cycle: what is captured.
            num_tokens: N.
            attn_backend, draft_backend: attention of the target for N tokens and of the drafter for W; None: their own.
            sizes: batch sizes to capture, some of SGLang's and ascending; None: all of them.
            common: the runner of the N that has graphs for all batch sizes; None: this is it.
        """
        self.num_tokens, self._sizes = num_tokens, sizes
        # W, and the rows of the drafter's forward.
        self._draft_length = min(num_tokens, cycle.block_size)
        self._draft_rows = cycle.draft_rows(self._draft_length)
        self._cycle = cycle
        target_backend = attn_backend or model_runner.attn_backend
        self.draft_backend = draft_backend or cycle.draft_runner.attn_backend
        self._target_plan = block_plan(target_backend, num_tokens)
        bound_index_buffer(target_backend, common and common.attn_backend)
        self._draft_plan = None
        # Length 1 has no drafts.
        if self._draft_length > 1:
            self._draft_plan = block_plan(self.draft_backend, self._draft_rows)
            bound_index_buffer(self.draft_backend, common and common.draft_backend)
            # A drafter's backends plan on the GPU alone (`backends.DRAFT_BACKENDS`).
            assert not self._draft_plan.needs_host_lens
        # Smallest batch that has a graph.
        self._min_bs = 1
        # By batch size P: see `_Graph.drafts`.
        self._drafts: dict[int, torch.Tensor] = {}
        # By batch size, and whether nothing but an argmax reads the target's logits.
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        # By batch size: making these views anew is a twentieth of what a cycle costs the host.
        self._inputs: dict[int, CycleInputs] = {}
        self._is_greedy = False
        super().__init__(model_runner, attn_backend=attn_backend, speculative_num_draft_tokens=num_tokens)
        # Other inputs of the model, such as the token count of expert parallelism.
        self._has_more_inputs = bool(set(self.buffer_registry.slot_names()) - _COMMON_BUFFERS)

    @classmethod
    def install(cls, target_runner: ModelRunner, cycle: DecodeCycle) -> None:
        """Have a target capture whole cycles. It has its KV pools and no graphs yet."""
        num_tokens = cycle.verification.num_tokens
        attn_backend = cycle.verification.graph_backend(num_tokens)
        bound = partial(cls, cycle=cycle, num_tokens=num_tokens, attn_backend=attn_backend)
        # SGLang asks the class for this before it makes a runner.
        bound.decode_graph_gather_requirements = cls.decode_graph_gather_requirements
        # SGLang takes the class from this method, "to install specialized decode graph runners".
        target_runner._decode_cuda_graph_runner_cls = lambda: bound
        # SGLang would make room for float32 logits of all verified tokens, which nobody writes (`verify.logits`).
        # Prefills use one row per request.
        max_rows = target_runner.max_shared_logits_buffer_rows
        target_runner.max_shared_logits_buffer_rows = lambda: max_rows() // max_speculative_num_draft_tokens()

    def other(self, num_tokens: int, sizes: Sequence[int]) -> CycleGraphRunner:
        """Capture the same cycles with another N = `num_tokens`, for some of the batch sizes, ascending."""
        cycle, draft_backend = self._cycle, self.draft_backend
        attn_backend = cycle.verification.graph_backend(num_tokens)
        draft_length = min(num_tokens, cycle.block_size)
        if draft_length > 1:
            draft_backend = build_backend(cycle.draft_runner, cycle.draft_rows(draft_length))
        return type(self)(self.model_runner, cycle, num_tokens, attn_backend, draft_backend, sizes, common=self)

    @contextmanager
    def serving(self, is_greedy: bool) -> Iterator[None]:
        """Send the target's forward through this runner and its backend.

        Args:
            is_greedy: nothing but an argmax reads the target's logits.
        """
        self._is_greedy = is_greedy
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
        max_bs = self.max_bs if self._sizes is None else self._sizes[-1]
        rows = self._cycle.verification.block_rows(rows, max_bs * self._draft_length)
        # Greedy while graphs are captured.
        self._block = Block.of(*rows, buffers.req_pool_indices[:max_bs], buffers.seq_lens[:max_bs])
        if self._draft_plan is not None:
            # SGLang has given its own backend its buffers by now.
            self.draft_backend.init_cuda_graph_state(max_bs, max_bs * self._draft_rows)
        if self._sizes is not None:
            # Smaller batches would be padded further than those between two sizes.
            self._min_bs = max((bs for bs in self.capture_bs if bs < self._sizes[0]), default=0) + 1
            self.capture_bs = list(self._sizes)
        super().capture()

    def get_spec_info(self, num_tokens: int) -> DFlashVerifyInput:
        """Return the captured batches' spec_info. Chains are causal, so no backend needs a mask. Trees have our own
        attention."""
        return DFlashVerifyInput(
            draft_token=None,
            positions=None,
            draft_token_num=self.num_tokens,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )

    def capture_prepare(self, *args, **kwargs):
        prepared = super().capture_prepare(*args, **kwargs)
        batch = prepared[0]
        block = self._block.take(batch.batch_size, self._draft_length)
        if self._draft_plan is not None:
            self._draft_plan.capture(self._cycle.draft_batch(batch, self._cycle.draft_block(block)))
        if batch.batch_size not in self._drafts:
            # Pinned memory cannot be allocated during a capture.
            shape = (batch.batch_size, self._draft_length)
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
        for is_greedy in self._variants(size):
            captured = partial(self._forward, forward, is_greedy)
            super().capture_one_shape(size, captured, stream_idx, _variant_label(is_greedy))

    def _variants(self, bs: int) -> tuple[bool, ...]:
        """Return whether logits are only for an argmax, of each graph for a batch size."""
        # A backend that is prepared before every replay knows one graph of each size.
        if self._target_plan.needs_host_lens or not self._cycle.logits.has_faster_argmax(bs * self.num_tokens):
            return (False,)
        return (False, True)

    @shared_schedules()
    def _forward(
        self,
        forward: Callable,
        is_greedy: bool,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: ForwardBatch,
        **kwargs,
    ) -> LogitsProcessorOutput:
        """Run a cycle in place of the target's forward: for warm-up, and once more while the graph is captured."""
        bs = batch.batch_size
        executor = CapturingExecutor(
            draft_backend=self.draft_backend,
            draft_plan=self._draft_plan,
            target_plan=self._target_plan,
            forward=lambda batch: forward(input_ids, positions, batch, **kwargs),
            drafts=self._drafts[bs],
            has_drafted=torch.cuda.Event(external=True),
        )
        cycle = self._cycle.run(batch, self._block.take(bs, self._draft_length), is_greedy, executor)
        backends = [*parts(self.attn_backend), *([] if self._draft_plan is None else [self.draft_backend])]
        # The next variant of this size gets new ones.
        metadata = tuple(backend.forward_metadata for backend in backends) if len(self._variants(bs)) > 1 else ()
        # Not for CPUs, where this module is imported too.
        from sglang.srt.model_executor.runner_backend_utils.weak_ref_tensor import weak_ref_tensor

        # What takes most of the memory is read right after a replay, if at all: the next graph is captured in it.
        output = replace(
            cycle.target_output,
            next_token_logits=weak_ref_tensor(cycle.target_output.next_token_logits),
            hidden_states=weak_ref_tensor(cycle.target_output.hidden_states),
        )
        verified = replace(cycle.verified, hidden_states=weak_ref_tensor(cycle.verified.hidden_states))
        # The last run is the captured one. A replay fills its memory.
        self._graphs[bs, is_greedy] = _Graph(batch, executor.drafts, executor.has_drafted, verified, metadata)
        return output

    # --- replay -----------------------------------------------------------------------------------------------------

    def inputs(self, bs: int) -> CycleInputs | None:
        """Return the static buffers for a batch size; None: there is no such graph."""
        if not self.has(bs):
            return None
        if bs not in self._inputs:
            blocks = (self._block.take(size, self._draft_length) for size in (self.padded(bs), bs))
            rows = slice(bs * self.num_tokens)
            buffers = self.buffers
            self._inputs[bs] = CycleInputs(
                *blocks, buffers.input_ids[rows], buffers.positions[rows], buffers.out_cache_loc[rows]
            )
        return self._inputs[bs]

    def has(self, bs: int) -> bool:
        """Return True if there is a graph for a batch size."""
        if self.disable_padding:
            return bs in self.capture_bs
        return self._min_bs <= bs <= self.capture_bs[-1]

    def padded(self, bs: int) -> int:
        """Return P, the batch size of that graph."""
        return self._pad_to_bucket(bs, self.capture_bs)

    def seconds(self, bs: int) -> float:
        """Return the duration of a replay, for requests without a context and each with its own bonus token.

        Requests with one token would share the experts of a mixture, and a large batch would look faster than it is.
        The graph computes all logits. That of greedy requests is up to 3 % faster for few rows.
        """
        block = self._block.take(bs, self._draft_length)
        step = self.model_runner.model_config.vocab_size // bs
        block.input_ids.view(bs, -1)[:, 0] = step * torch.arange(bs, device=block.input_ids.device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self.backend.replay_session():
            begin.record()
            self.backend.replay(self._make_graph_key(bs), self._graphs[bs, False].batch)
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def load_batch(self, forward_batch: ForwardBatch, pp_proxy_tensors=None) -> None:
        """Prepare a replay for a batch whose inputs are in the static buffers already."""
        bs = forward_batch.batch_size
        padded_bs = self.padded(bs)
        num_tokens, padded_num_tokens = (size * self.num_tokens for size in (bs, padded_bs))
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
            padding = torch.full((padded_bs - bs,), 1 + self.num_tokens)
            kv_lens = torch.cat((forward_batch.seq_lens_cpu.to(torch.int64), padding))
            batch = self._graphs[padded_bs, False].batch
            self._target_plan.before_replay(replace(batch, seq_lens_cpu=kv_lens, seq_lens_sum=int(kv_lens.sum())))
        self.raw_bs, self.raw_num_token, self.bs = bs, num_tokens, padded_bs
        self._is_greedy &= (padded_bs, True) in self._graphs
        self._replay_graph_key = self._make_graph_key(padded_bs, variant_label=_variant_label(self._is_greedy))

    def _resolve_shared_read_ends(self, attn_backend: AttentionBackend, forward_mode: ForwardMode) -> SharedReadEnds:
        """Let the scheduler change `req_to_token` after the replay only: the whole graph reads it."""
        return SharedReadEnds.POST_REPLAY

    def output(self, batch: ForwardBatch, target_output: LogitsProcessorOutput, has_grammar: bool) -> CycleOutput:
        """Return the last replay's result.

        What was accepted is a copy. The rest is in the graph's memory.

        Args:
            batch: as it was replayed.
            target_output: the target's.
            has_grammar: the batch has a request with a grammar.
        """
        graph, bs = self._graphs[self.bs, self._is_greedy], self.raw_bs
        grammar_tree = None
        if has_grammar:
            grammar_tree = GrammarTree(GrammarTree.from_linear_chain(graph.drafts[:bs]).resolve(), graph.has_drafted)
        return CycleOutput(batch, target_output, graph.verified.take(bs), grammar_tree, is_replay=True)


@dataclass(frozen=True)
class CaptureCost:
    """Start-up cost of the graphs of all but the common draft length.

    Attributes:
        num_graphs: of all these draft lengths.
        seconds: to capture them.
        gib: GPU memory that PyTorch has reserved for them on this rank, in GiB.
    """

    num_graphs: int
    seconds: float
    gib: float

    def __str__(self) -> str:
        return (
            f"{self.num_graphs} CUDA graphs of other draft lengths were captured in {self.seconds:.1f} s and take "
            f"{self.gib:.2f} GiB."
        )


class CycleGraphs:
    """Graphs of every draft length N that a server chooses from.

    Attributes:
        lengths: these N, ascending.
        common_length: the N that has graphs for all batch sizes.
        cost_of_others: what the graphs of all other N have taken; None: there are none.
    """

    def __init__(self, common: CycleGraphRunner, lengths: tuple[int, ...]) -> None:
        """Time the graphs, and capture those of other draft lengths that may gain (:mod:`.adaptive.graph_sizes`).

        Args:
            common: graphs of the N that SGLang captures for all batch sizes.
            lengths: other N, ascending.
        """
        self._common, self.common_length = common, common.num_tokens
        self._runners = {self.common_length: common}
        self._seconds: dict[tuple[int, int], float] = {}
        self.cost_of_others: CaptureCost | None = None
        if lengths:
            self._seconds = self._time()
            of_common = {bs: self._seconds[bs, self.common_length] for bs in common.capture_bs}
            sizes = {length: graph_sizes(length, self.common_length, of_common) for length in lengths}
            begun, before = time.perf_counter(), _reserved_gib()
            self._runners |= {length: common.other(length, of) for length, of in sizes.items() if of}
            self.cost_of_others = CaptureCost(
                num_graphs=sum(map(len, sizes.values())),
                seconds=time.perf_counter() - begun,
                gib=_reserved_gib() - before,
            )
            self._seconds = self._time()
            ms = {key: round(1e3 * seconds, 2) for key, seconds in sorted(self._seconds.items())}
            log_info_on_rank0(logger, str(self.cost_of_others))
            log_info_on_rank0(logger, f"Milliseconds of a cycle by batch size and verified tokens of a request: {ms}")
        self.lengths = tuple(sorted(self._runners))

    def __getitem__(self, length: int) -> CycleGraphRunner:
        return self._runners[length]

    def padded(self, bs: int) -> int:
        """Return the batch size P of the common draft's graphs for bs requests; bs if there is no graph."""
        return self._common.padded(bs) if self._common.has(bs) else bs

    def cost(self, bs: int, length: int) -> float:
        """Return the seconds of a cycle without contexts; inf if there is no graph."""
        runner = self._runners[length]
        return self._seconds[runner.padded(bs), length] if runner.has(bs) else math.inf

    @property
    def sizes(self) -> dict[str, list[int]]:
        """The batch sizes P of the graphs of each N."""
        return {str(length): list(self._runners[length].capture_bs) for length in self.lengths}

    def _time(self) -> dict[tuple[int, int], float]:
        """Return the seconds of a cycle by batch size and N.

        All N of a batch size are timed right after each other, several times. Another process or the GPU's clock may
        slow it down at start-up, and must not make one N look better than another.
        """
        runners = self._runners.values()
        turns = [(bs, runner) for bs in self._common.capture_bs for runner in runners if bs in runner.capture_bs]
        seconds = dict.fromkeys(((bs, runner.num_tokens) for bs, runner in turns), math.inf)
        for bs, runner in turns * TIMED_REPLAYS:
            seconds[bs, runner.num_tokens] = min(seconds[bs, runner.num_tokens], runner.seconds(bs))
        # All ranks choose by the same times.
        return get_parallel().tp_group.broadcast_object(seconds, src=0)


def _reserved_gib() -> float:
    """Return what PyTorch has reserved of this GPU. Other processes change the free memory."""
    return torch.cuda.memory_reserved() / 2**30
