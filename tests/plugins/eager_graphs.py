"""Test plugin: CUDA graphs without CUDA.

It uses SGLang's decode graph runner and ours, with a backend that runs the captured function again. Every run prepares
attention, so attention needs no plan. Everything else of `graphs.py` works as on a GPU, memory too. The results of a
replay are where those of the capture were, and overwrite those of the last replay of any graph that shares the memory.
No input buffer keeps the input of the last replay.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import torch

logger = logging.getLogger(__name__)

# Inputs of the target's verification.
ROWS = ("input_ids", "positions", "out_cache_loc")


class EagerBackend:
    """Replacement of `FullCudaGraphBackend`."""

    # Outputs of all graphs, which share memory.
    shared: ClassVar[list[torch.Tensor]] = []

    def __init__(self, runner) -> None:
        self._runner, self._captured, self._replayed = runner, {}, set()

    @contextmanager
    def capture_session(self, stream):
        yield

    @contextmanager
    def replay_session(self):
        yield

    def capture_one(self, key, forward, capture_inputs=None, post_warmup_hook=None) -> None:
        before = dict(self._runner._graphs)
        output = forward()
        [(kept_as, kept)] = [item for item in self._runner._graphs.items() if item[1] is not before.get(item[0])]
        self._captured[key] = forward, output, kept_as, kept
        self.shared.extend((output.next_token_logits, output.hidden_states))

    def can_run(self, forward_batch, key) -> bool:
        return key in self._captured

    def replay(self, key, forward_batch):
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        if key not in self._replayed:
            self._replayed.add(key)
            logger.warning("Replayed: %d rows, %s", self._runner.num_tokens, key)
        forward, output, kept_as, kept = self._captured[key]
        for tensor in self.shared:
            tensor.fill_(torch.nan)
        with forward_context(ForwardContext(attn_backend=self._runner.attn_backend)):
            overwrite(output, forward())
        verified, new = kept.verified, self._runner._graphs[kept_as].verified
        overwrite(verified.accepted, new.accepted)
        # For chains, the hidden states are the target's output, which was overwritten above.
        if verified.hidden_states is not output.hidden_states:
            overwrite(verified, new)
        self._runner._graphs[kept_as] = kept
        return output


def overwrite(results, new_results) -> None:
    """Copy every tensor attribute of an object from another object of the same class."""
    for name, tensor in vars(results).items():
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(getattr(new_results, name))


def spoil(block) -> None:
    """Fill a graph's buffers with values that no replay can run with."""
    for name, value in vars(block).items():
        if not isinstance(value, torch.Tensor):
            spoil(value)
        elif name != "seed":
            value.fill_(torch.nan if value.is_floating_point() else -(2**30))


class Event:
    """Replacement of `torch.cuda.Event`."""

    def __init__(self, **options) -> None:
        self.time = 0.0

    def record(self, stream=None) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def wait(self, stream=None) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.time - self.time)


class Plan:
    """A `BlockPlan` for any backend."""

    needs_host_lens = False

    def __init__(self, backend, block_size) -> None:
        self._backend = backend

    def capture(self, batch) -> None:
        pass

    def record(self, batch) -> None:
        self._backend.init_forward_metadata(batch)


def spoiled(inputs):
    """Wrap `CycleGraphRunner.inputs`, which a cycle begins with."""

    def spoiled_inputs(runner, bs: int):
        found = inputs(runner, bs)
        if found is not None:
            spoil(runner._block)
            # The inputs of trees have their own buffers.
            spoil(SimpleNamespace(**{name: getattr(runner.buffers, name) for name in ROWS}))
        return found

    return spoiled_inputs


def register() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner

    from sglang_dflash.engine import graphs
    from sglang_dflash.engine.adaptive import controller, graph_sizes
    from sglang_dflash.engine.worker import DFlashWorker
    from sglang_dflash.ops import add_norm, small_m_linear
    from sglang_dflash.verify import sampler
    from sglang_dflash_cpu import packed_linear

    empty = torch.empty

    def unpinned(*args, pin_memory=False, **options):
        return empty(*args, **options)

    @contextmanager
    def graph_capture(stream=None):
        yield SimpleNamespace(stream=None)

    # SGLang's module cannot be imported without a GPU.
    sys.modules["sglang.srt.model_executor.runner_backend_utils.weak_ref_tensor"] = SimpleNamespace(
        weak_ref_tensor=lambda tensor: tensor
    )
    controller.get_dram_gbps = lambda: 20.0
    torch.empty = unpinned
    torch.cuda.Event = torch.cpu.Event = Event
    torch.cpu.is_current_stream_capturing = lambda: False
    decode_cuda_graph_runner.graph_capture = graph_capture
    decode_cuda_graph_runner.resolve_decode_backend = EagerBackend
    decode_cuda_graph_runner.get_available_gpu_memory = lambda *args, **options: 0.0
    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph
    TorchNativeAttnBackend.forward_metadata = None
    TorchNativeAttnBackend.init_cuda_graph_state = lambda self, max_bs, max_num_tokens: None
    TorchNativeAttnBackend.init_forward_metadata_out_graph = lambda self, batch, in_capture=False: None
    TorchNativeAttnBackend.init_forward_metadata_in_graph = lambda self, batch: None
    TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda self: 1
    graphs.block_plan = Plan
    graphs.CycleGraphRunner.inputs = spoiled(graphs.CycleGraphRunner.inputs)
    # A CPU is always busy; noise must not decide which sizes are captured.
    graph_sizes.MIN_GAIN, graph_sizes.MAX_LOSS = 0, math.inf
    # SGLang's sampler takes two requests of the tiny target at a time.
    sampler.SAMPLER_BYTES = 2 * sampler.sampler_bytes(1024, 16)
    # The cycle samples by itself, as on a GPU.
    sampler.FallbackSampler._can_draw = lambda _, info: info.sampling_seed is None
    # For inputs of one to four blocks, as on a GPU for larger weights.
    small_m_linear.faster_rows = lambda weight, is_gated: small_m_linear.MAX_ROWS
    add_norm.is_plain_norm = lambda norm: True
    packed_linear.install = lambda model: add_norm.install(model, small_m_linear.install(model) > 0)

    init_cuda_graphs = DFlashWorker.init_cuda_graphs

    def with_graphs(worker: DFlashWorker) -> None:
        runner = worker.target_worker.model_runner
        max_rows = runner.max_shared_logits_buffer_rows()

        def get_logits_buffer(vocab_size: int, rows: int) -> torch.Tensor:
            # SGLang allocates one row per request.
            assert rows == max_rows
            return torch.empty(rows, vocab_size)

        runner.graph_shared_output = SimpleNamespace(get_logits_buffer=get_logits_buffer)
        # On a GPU it is asked before any graph is captured.
        assert runner.decode_graph_gather_requirements() == (False, False)
        runner.decode_cuda_graph_runner = runner._decode_cuda_graph_runner_cls()(runner)
        init_cuda_graphs(worker)

    DFlashWorker.init_cuda_graphs = with_graphs
