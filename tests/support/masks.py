"""Run blocks of drafter queries through an attention backend of SGLang, and write the error of every mask.

It is a program because SGLang keeps state per process.
usage: masks.py BACKEND DTYPE PAGE_SIZE HEADS KV_HEADS HEAD_DIM OUTPUT

OUTPUT becomes a JSON object: mask -> largest error (see `Blocks.error`). Prefixes of masks:
    refused: this package does not serve the mask on this backend.
    in-tree: computed without this package's hook.
    own pool: sliding layers have their own KV slots, as a target's may.
    replayed: computed in a CUDA graph; on a CPU, by the calls that a graph would record.
    prefill of N: computed in a CUDA graph of a whole prefill, of N requests. Only of fa3.
Every mask but those of the first two prefixes is also replayed. Under Triton's interpreter only those of two pools are.
Without a GPU, fa3 is SGLang's backend over `fa3_stand_in`.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from sglang.srt.plugins import load_plugins
from support.attention_reference import dense_attention

from models.tiny import DRAFTER_DIR, TARGET_DIR

BLOCK_SIZE = 16
# Shorter than the block; not a multiple of a page.
WINDOWS = [8, 50]
# Shorter than the second window, equal to it, one longer, much longer. The last one has two of FA3's tiles of keys.
CONTEXT_LENS = [1, 49, 50, 51, 200, 16, 170]
EVERY_ROW = range(len(CONTEXT_LENS))
# The target's. The block of the longest request ends after it, also past the last page of 1, 16 or 64 tokens. Blocks
# that are drafted before the scheduler knows that their request has ended do so too.
CONTEXT_LIMIT = 192
# Requests and tokens of a graph of a whole prefill.
PREFILL_REQUESTS, PREFILL_TOKENS = 12, 96
# Requests of each prefill, as indices of CONTEXT_LENS. All are within the limit. Four are few, and five are not.
PREFILLS = [[6], [1, 3, 5, 6], [0, 1, 3, 5, 6]]


def model_runner(backend: str, dtype: str, page_size: int, heads: int, kv_heads: int, head_dim: int):
    """Return SGLang's model runner for a target with dummy weights and this geometry."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import SpawnRanks, get_device, get_schedule, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    geometry = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    server_args = ServerArgs(
        model_path=str(TARGET_DIR),
        device="cuda" if torch.cuda.is_available() else "cpu",
        dtype=dtype,
        load_format="dummy",
        json_model_override_args=json.dumps(geometry),
        attention_backend=backend,
        page_size=page_size,
        context_length=CONTEXT_LIMIT,
        max_total_tokens=4096,
        max_running_requests=16,
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=str(DRAFTER_DIR),
    )
    # As a scheduler does before it loads a model.
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    model_config, port = ModelConfig.from_server_args(server_args), PortArgs.init_new(server_args).nccl_port
    bootstrap.init_parallel_runtime(server_args=server_args, device=get_device().device, dist_port=port)
    bootstrap.init_layer_runtime(model_config=model_config)
    runner = ModelRunner(
        model_config=model_config,
        mem_fraction_static=get_schedule().mem_fraction_static,
        gpu_id=0,
        nccl_port=port,
        server_args=server_args,
    )
    runner.alloc_memory_pool()
    # Backends ask the runner which backends it has.
    runner.init_attention_backends()
    return runner


class Graph:
    """CUDA graph; on a CPU, the function that it would record."""

    def __init__(self, device: str) -> None:
        self._graph = torch.cuda.CUDAGraph() if device == "cuda" else None

    @contextmanager
    def stream(self):
        if self._graph is None:
            yield
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)

    def record(self, forward) -> None:
        self._forward = forward
        forward()
        if self._graph is not None:
            forward()
            with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream()):
                self._outputs = forward()

    def replay(self) -> list[torch.Tensor]:
        if self._graph is None:
            return self._forward()
        self._graph.replay()
        return self._outputs


class Blocks:
    """A batch of requests with context KV in scattered pages, and queries, keys and values of a block after it."""

    def __init__(self, runner, page_size: int, heads: int, kv_heads: int, head_dim: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape):
            return torch.randn(*shape, generator=generator).to(runner.device, runner.dtype)

        self.runner, self.heads, self.kv_heads, self.head_dim = runner, heads, kv_heads, head_dim
        # Small queries weigh all keys alike, so that one key too many or too few changes the output.
        self.queries = [0.2 * randn(BLOCK_SIZE, heads, head_dim) for _ in CONTEXT_LENS]
        self.keys = [randn(length + BLOCK_SIZE, kv_heads, head_dim) for length in CONTEXT_LENS]
        self.values = [randn(length + BLOCK_SIZE, kv_heads, head_dim) for length in CONTEXT_LENS]
        self.sliding_layer_id = 0
        # Page 0 is for padding.
        pages = torch.randperm(runner.token_to_kv_pool.size // page_size - 1, generator=generator) + 1
        self.slots = []
        for row, length in enumerate(CONTEXT_LENS):
            num_pages = -(-(length + BLOCK_SIZE) // page_size)
            slots = (pages[:num_pages, None] * page_size + torch.arange(page_size)).flatten()[: length + BLOCK_SIZE]
            pages = pages[num_pages:]
            self.slots.append(slots.to(runner.device))
            runner.req_to_token_pool.req_to_token[row + 1, : length + BLOCK_SIZE] = self.slots[-1].to(torch.int32)

    def layer(self, window: int | None, causal: bool):
        from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

        return RadixAttention(
            self.heads,
            self.head_dim,
            self.head_dim**-0.5,
            self.kv_heads,
            layer_id=0 if window is None else self.sliding_layer_id,
            sliding_window_size=-1 if window is None else window - 1,
            attn_type=AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY,
        )

    def inputs(self, rows: Sequence[int] = EVERY_ROW) -> list[torch.Tensor]:
        """Return queries, keys and values of the blocks of some requests as a layer passes them to its backend."""
        keys, values = (torch.cat([each[row][-BLOCK_SIZE:] for row in rows]) for each in (self.keys, self.values))
        return [torch.cat([self.queries[row] for row in rows]).flatten(1), keys, values]

    def batch(self):
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        from sglang_dflash.attention.verify_input import DFlashVerifyInput

        device, lens = self.runner.device, torch.tensor(CONTEXT_LENS)
        positions = torch.cat([torch.arange(length, length + BLOCK_SIZE) for length in CONTEXT_LENS])
        # As the worker fills it in: lengths on the CPU include the block.
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(lens),
            input_ids=torch.zeros_like(positions).to(device),
            req_pool_indices=torch.arange(1, len(lens) + 1, device=device),
            seq_lens=lens.to(device),
            seq_lens_cpu=lens + BLOCK_SIZE,
            seq_lens_sum=int((lens + BLOCK_SIZE).sum()),
            out_cache_loc=torch.cat([slots[-BLOCK_SIZE:] for slots in self.slots]),
            positions=positions.to(device),
            spec_info=DFlashVerifyInput(draft_token=None, positions=None, draft_token_num=BLOCK_SIZE),
        )
        self.runner.kv_index_translator.bind_own_plan(batch)
        return batch

    def part_pools(self) -> None:
        """Give sliding layers their own pool, with pages in another order."""
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        flat = self.runner.token_to_kv_pool
        pool = SWAKVPool(
            size=flat.size,
            size_swa=flat.size,
            page_size=flat.page_size,
            dtype=flat.dtype,
            head_num=self.kv_heads,
            head_dim=self.head_dim,
            full_attention_layer_ids=[0],
            swa_attention_layer_ids=[1],
            device=flat.device,
        )
        num_pages = flat.size // flat.page_size + 1
        pages = torch.cat((torch.zeros(1, dtype=torch.int64), torch.arange(num_pages - 1, 0, -1)))
        slots = (pages[:, None] * flat.page_size + torch.arange(flat.page_size)).flatten()
        pool.register_mapping(torch.cat((slots, torch.tensor([-1]))).to(flat.device))
        self.runner.token_to_kv_pool, self.sliding_layer_id = pool, 1
        self.runner.init_kv_index_translator()

    def fill_pool(self) -> None:
        pool = self.runner.token_to_kv_pool
        for layer_id in {0, self.sliding_layer_id}:
            buffers = pool.get_kv_buffer(layer_id)
            # Reading past a request's keys, or leaving a block's keys unwritten, must change the output.
            for buffer in buffers:
                buffer.fill_(100.0)
            for slots, *contexts in zip(self.slots, self.keys, self.values):
                slots = slots if layer_id == 0 else pool.translate_loc_from_full_to_swa(slots)
                for buffer, context in zip(buffers, contexts):
                    buffer[slots[:-BLOCK_SIZE]] = context[:-BLOCK_SIZE]

    def attend(self, backend, window: int | None, causal: bool) -> float:
        """Return the error of a layer's output without a graph."""
        self.fill_pool()
        batch = self.batch()
        backend.init_forward_metadata(batch)
        return self.error(backend.forward(*self.inputs(), self.layer(window, causal), batch), window, causal)

    def replay(self, backend, masks: list[tuple[int | None, bool]]) -> list[float]:
        """Return the errors of layers with these masks in one CUDA graph, captured as `CycleGraphRunner` does.

        There are two layers of each mask, because layers share what they can. The graph is captured for requests of one
        token in padding. Then this batch is copied into its buffers.
        """
        from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

        from sglang_dflash.attention.fa3 import shared_schedules
        from sglang_dflash.attention.plan import block_plan

        batch, inputs = self.batch(), self.inputs()
        lens = torch.ones(batch.batch_size, dtype=torch.int64)
        static_inputs = [torch.zeros_like(x) for x in inputs]
        static = replace(
            batch,
            req_pool_indices=torch.zeros_like(batch.req_pool_indices),
            seq_lens=torch.ones_like(batch.seq_lens),
            seq_lens_cpu=lens,
            seq_lens_sum=int(lens.sum()),
            out_cache_loc=torch.zeros_like(batch.out_cache_loc),
            positions=torch.zeros_like(batch.positions),
        )
        self.runner.kv_index_translator.bind_runner_slots(static)
        layers = [self.layer(*mask) for mask in masks] * 2
        plan = block_plan(backend, BLOCK_SIZE)
        backend.init_cuda_graph_state(batch.batch_size, len(batch.positions))
        # A drafter's plan must prepare nothing on the host before a replay.
        assert not plan.needs_host_lens

        @shared_schedules()
        def forward() -> list[torch.Tensor]:
            plan.record(static)
            return [backend.forward(*static_inputs, layer, static) for layer in layers]

        graph = Graph(self.runner.device)
        with model_capture_mode(), graph.stream():
            plan.capture(static)
            graph.record(forward)

        self.fill_pool()
        for name in ("req_pool_indices", "seq_lens", "out_cache_loc", "positions"):
            getattr(static, name).copy_(getattr(batch, name))
        for buffer, x in zip(static_inputs, inputs):
            buffer.copy_(x)
        errors = [self.error(output, *mask) for output, mask in zip(graph.replay(), masks * 2)]
        return [max(both) for both in zip(errors[: len(masks)], errors[len(masks) :])]

    def prefill(self, backend, masks: list[tuple[int | None, bool]]) -> dict[tuple[int, int], float]:
        """Return errors of prefills of blocks after cached contexts, by number of requests and index of the mask.

        Each graph is captured for one request, as `PrefillCudaGraphRunner` does. There are two layers of each mask.
        """
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
        from sglang.srt.model_executor.runner.shape_key import ShapeKey
        from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend

        from sglang_dflash.attention.fa3_prefill import resolve_prefill_backend

        device = self.runner.device
        runner = SimpleNamespace(
            device=device,
            device_module=torch.get_device_module(device),
            model_runner=SimpleNamespace(
                attn_backend=backend, spec_algorithm=self.runner.spec_algorithm, dtype=self.runner.dtype
            ),
            _capture_req_slots=PREFILL_REQUESTS,
        )
        # The tiles of one request leave half of it idle, and those of four do not.
        small_gpu = SimpleNamespace(multi_processor_count=8 * self.kv_heads)
        with patch.object(torch.cuda, "get_device_properties", lambda device: small_gpu):
            graphs = resolve_prefill_backend(FullCudaGraphBackend, runner)
            self.check_refusals(backend, runner)
        lens = torch.where(torch.arange(PREFILL_REQUESTS) == 0, PREFILL_TOKENS, 0)
        tokens = torch.zeros(PREFILL_TOKENS, dtype=torch.int64, device=device)
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=PREFILL_REQUESTS,
            input_ids=tokens,
            req_pool_indices=torch.zeros(PREFILL_REQUESTS, dtype=torch.int64, device=device),
            seq_lens=lens.to(device, copy=True),
            seq_lens_cpu=lens,
            seq_lens_sum=PREFILL_TOKENS,
            extend_seq_lens=lens.to(device, copy=True),
            out_cache_loc=tokens.clone(),
            positions=tokens.clone(),
        )
        self.runner.kv_index_translator.bind_runner_slots(batch)
        static_inputs = [x.new_zeros(PREFILL_TOKENS, *x.shape[1:]) for x in self.inputs()]
        # Attention writes its output there.
        batch._attn_output = torch.zeros_like(static_inputs[0])
        layers = [self.layer(*mask) for mask in masks] * 2

        # Requests and splits of FA3's calls.
        calls, attend = [], backend.flash_attn_with_kvcache

        def record_call(page_table: torch.Tensor, num_splits: int, **arguments) -> torch.Tensor:
            calls.append((len(page_table), num_splits))
            return attend(page_table=page_table, num_splits=num_splits, **arguments)

        def forward() -> list[torch.Tensor]:
            outputs = []
            for layer in layers:
                output = backend.forward(*static_inputs, layer, batch)
                # Otherwise SGLang copies it.
                assert output.data_ptr() == batch._attn_output.data_ptr()
                outputs.append(output.clone())
            return outputs

        backend.flash_attn_with_kvcache = record_call
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        with graphs.capture_session(torch.cuda.Stream() if device == "cuda" else None):
            graphs.capture_one(ShapeKey(PREFILL_TOKENS), forward)
        (of_all, not_split), (of_few, are_split) = dict.fromkeys(calls)
        assert (of_all, not_split, of_few) == (PREFILL_REQUESTS, 1, 4) and are_split > 1
        variants, replay, errors = [], FullCudaGraphBackend.replay, {}

        def record_variant(graphs, shape_key: ShapeKey, batch) -> list[torch.Tensor]:
            variants.append(shape_key.attention_variant)
            return replay(graphs, shape_key, batch)

        for rows in PREFILLS:
            self.fill_pool()
            inputs = self.inputs(rows)
            for buffer, x in zip(static_inputs, inputs):
                buffer[: len(x)] = x
            lens = torch.zeros(PREFILL_REQUESTS, dtype=torch.int64)
            lens[: len(rows)] = torch.tensor([CONTEXT_LENS[row] for row in rows]) + BLOCK_SIZE
            batch.seq_lens.copy_(lens)
            batch.extend_seq_lens.copy_(torch.where(lens > 0, BLOCK_SIZE, 0))
            batch.req_pool_indices.zero_()[: len(rows)] = torch.tensor(rows, device=device) + 1
            batch.out_cache_loc.zero_()[: len(inputs[0])] = torch.cat([self.slots[row][-BLOCK_SIZE:] for row in rows])
            prepared = replace(batch, seq_lens_cpu=lens)
            # Sliding layers have other slots in each prefill.
            self.runner.kv_index_translator.bind_runner_slots(prepared)
            backend.init_forward_metadata_out_graph(prepared)
            with patch.object(FullCudaGraphBackend, "replay", record_variant):
                outputs = graphs.replay(ShapeKey(PREFILL_TOKENS), SimpleNamespace(batch_size=len(rows)))
            assert (variants.pop() is not None) == (len(rows) <= of_few)
            for index, (output, mask) in enumerate(zip(outputs, masks * 2)):
                key = (len(rows), index % len(masks))
                errors[key] = max(errors.get(key, 0.0), self.error(output[: len(inputs[0])], *mask, rows))
        return errors

    def check_refusals(self, backend, runner: SimpleNamespace) -> None:
        """Check that SGLang's graphs are kept where FA3's attention is not plain, or serves no target of DFLASH."""
        from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        from sglang_dflash.attention.fa3_prefill import resolve_prefill_backend

        model_runner = runner.model_runner
        for owner, name, value in (
            (model_runner, "spec_algorithm", SpeculativeAlgorithm.NONE),
            (model_runner, "attn_backend", SimpleNamespace()),
            (model_runner, "dtype", torch.float64),
            (backend, "fa_impl_ver", 4),
            (backend, "use_mla", True),
            (backend, "_disable_scheduler_metadata_precompute", True),
        ):
            with patch.object(owner, name, value):
                assert type(resolve_prefill_backend(FullCudaGraphBackend, runner)) is FullCudaGraphBackend, name
        parts = resolve_prefill_backend(lambda runner: runner, runner)
        assert parts is runner

    def error(self, output: torch.Tensor, window: int | None, causal: bool, rows: Sequence[int] = EVERY_ROW) -> float:
        """Return the largest error of an output, relative to the largest expected value of its token and head.

        A token that sees few keys has large outputs and large rounding errors, but one key more or less changes them
        more.
        """
        scale = self.head_dim**-0.5
        blocks = [(self.queries[row], self.keys[row], self.values[row]) for row in rows]
        expected = torch.cat([dense_attention(*each, window=window, causal=causal, scale=scale) for each in blocks])
        difference = (output.view_as(expected).double() - expected).abs()
        relative = difference.amax(-1) / expected.abs().amax(-1)
        # NaN must count as an error, but no comparison with NaN is true.
        return float(relative.nan_to_num(torch.inf).max())


def main(name: str, dtype: str, page_size: int, *geometry: int, output: str) -> None:
    load_plugins()
    on_cpu = not torch.cuda.is_available()
    runner = model_runner("torch_native" if on_cpu and name == "fa3" else name, dtype, page_size, *geometry)
    if on_cpu:
        from support import fa3_stand_in

        # Installed for every backend, so that all plans see the same FA3.
        fa3_stand_in.install()
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from sglang_dflash.checkpoint.config import TWO_SIDED_BACKENDS

    blocks = Blocks(runner, page_size, *geometry)
    errors = {}

    def draw(masks: dict[str, tuple[int | None, bool]], prefix: str = "") -> None:
        # Layers of both kinds share a backend.
        for mask, layer in masks.items():
            errors[prefix + mask] = blocks.attend(backend, *layer)
        if on_cpu and name == "triton" and not prefix:
            # The interpreter takes minutes.
            return
        served = {mask: layer for mask, layer in masks.items() if not mask.startswith("refused: ")}
        replayed = blocks.replay(ATTENTION_BACKENDS[name](runner), list(served.values()))
        errors.update({f"replayed: {prefix}{mask}": error for mask, error in zip(served, replayed)})
        if name == "fa3":
            causal = {mask: layer for mask, layer in masks.items() if layer[1]}
            prefilled = blocks.prefill(ATTENTION_BACKENDS[name](runner), list(causal.values()))
            for (num_requests, index), error in prefilled.items():
                errors[f"prefill of {num_requests}: {prefix}{list(causal)[index]}"] = error

    for window in WINDOWS:
        runner.sliding_window_size = window - 1
        backend = ATTENTION_BACKENDS[name](runner)
        masks = {}
        for causal in (False, True):
            masks[f"full, causal={causal}, beside {window}"] = (None, causal)
            served = causal or window >= BLOCK_SIZE or name in TWO_SIDED_BACKENDS
            masks[f"{'' if served else 'refused: '}sliding {window}, causal={causal}"] = (window, causal)
        draw(masks)
        if name == "flashinfer":
            from sglang.srt.layers.attention.flashinfer_backend import FlashInferIndicesUpdaterPrefill as Updater

            hooked, Updater.call_begin_forward = Updater.call_begin_forward, Updater.call_begin_forward.__wrapped__
            errors[f"in-tree: sliding {window}, causal=True"] = blocks.attend(backend, window, causal=True)
            Updater.call_begin_forward = hooked
    blocks.part_pools()
    for window in WINDOWS:
        runner.sliding_window_size = window - 1
        backend = ATTENTION_BACKENDS[name](runner)
        masks = {f"full, beside {window}": (None, True), f"sliding {window}": (window, True)}
        draw(masks, "own pool: ")
    Path(output).write_text(json.dumps(errors))


if __name__ == "__main__":
    backend, dtype, *numbers, output = sys.argv[1:]
    main(backend, dtype, *map(int, numbers), output=output)
