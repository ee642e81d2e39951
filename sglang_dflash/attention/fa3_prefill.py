"""CUDA graphs of whole prefills on FA3, without work for requests that a prefill does not have.

SGLang's graph of a whole prefill has a fixed number of requests. For few tiles of queries FA3 splits the keys among
thread blocks, and merges the parts in one more launch. That launch has thread blocks for the most tokens of every
request. Attention of 256 tokens takes 59 us in each layer of a graph for 64 requests, and 13 for one
(scripts/results/cycle_notes.md). So sizes of few tokens have two graphs. The one for few requests splits keys. More
requests fill half of the GPU without splits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.runner.shape_key import ShapeKey
from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import BaseCudaGraphBackend
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
from sglang.srt.runtime_context import get_exec

from sglang_dflash.attention.fa3 import is_plain_backend, shared_schedules

if TYPE_CHECKING:
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

_FEW_REQUESTS = "few_requests"


def splits(num_tokens: int, heads: int, kv_heads: int, head_dim: int, num_sms: int) -> tuple[int, int]:
    """Return how many times FA3 should split the keys in a prefill of few requests, and the most of these.

    Splits help if the tiles of one request leave half of the GPU idle. Each further request adds a tile per KV head.

    Args:
        num_tokens: size of the graph.
        heads, kv_heads: of this rank.
        num_sms: multiprocessors of the GPU, each of which runs one thread block of FA3.

    Returns:
        Splits of each tile's keys, and requests. (1, 0): keys should not be split.
    """
    # Heads that share a KV head are rows of the same tile.
    tile_rows = 128 if head_dim > 96 else 192
    tiles = kv_heads * -(-num_tokens * (heads // kv_heads) // tile_rows)
    return (num_sms // tiles, num_sms // (2 * kv_heads)) if 2 * tiles <= num_sms else (1, 0)


class PrefillGraphs(FullCudaGraphBackend):
    """Graphs of whole prefills. A prefill of few tokens and few requests has its own."""

    def __init__(self, runner: PrefillCudaGraphRunner, num_sms: int, **options) -> None:
        """
        Args:
            num_sms: multiprocessors of the GPU.
            options: of :class:`FullCudaGraphBackend`.
        """
        super().__init__(runner, **options)
        self._num_sms = num_sms
        # By size: the most requests that the graph for few requests takes.
        self._few: dict[int, int] = {}

    def capture_one(
        self,
        shape_key: ShapeKey,
        forward_fn: Callable[[], Any],
        capture_inputs: Any | None = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        runner = self._cuda_graph_runner
        backend = runner.model_runner.attn_backend
        # Each request has a token.
        most = min(runner._capture_req_slots, shape_key.size)
        heads = (backend.num_attention_heads, backend.num_kv_heads, backend.head_dim)
        num_splits, few = splits(shape_key.size, *heads, self._num_sms)
        if backend.num_splits == 1:
            # Deterministic inference.
            num_splits, few = 1, 0
        graphs = [(shape_key, most, num_splits if few >= most else 1)]
        if 0 < few < most:
            self._few[shape_key.size] = few
            graphs.append((_of_few(shape_key), few, num_splits))
        for key, *arguments in graphs:
            forward = shared_schedules(*arguments)(forward_fn)
            super().capture_one(key, forward, capture_inputs, post_warmup_hook)

    def replay(self, shape_key: ShapeKey, static_forward_batch: ForwardBatch, **kwargs) -> Any:
        if static_forward_batch.batch_size <= self._few.get(shape_key.size, 0):
            shape_key = _of_few(shape_key)
        return super().replay(shape_key, static_forward_batch, **kwargs)


def _of_few(shape_key: ShapeKey) -> ShapeKey:
    return replace(shape_key, attention_variant=_FEW_REQUESTS)


def resolve_prefill_backend(original, runner: PrefillCudaGraphRunner) -> BaseCudaGraphBackend:
    """AROUND `resolve_prefill_backend`: graphs of whole prefills of DFLASH's target on FA3 are `PrefillGraphs`."""
    backend, model_runner = original(runner), runner.model_runner
    if type(backend) is not FullCudaGraphBackend or not model_runner.spec_algorithm.is_dflash():
        return backend
    # Without a GPU, SGLang cannot import it.
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

    attention = model_runner.attn_backend
    if not isinstance(attention, FlashAttentionBackend) or not is_plain_backend(attention, model_runner.dtype):
        return backend
    num_sms = torch.cuda.get_device_properties(runner.device).multi_processor_count
    memory_saver = get_exec().features.enable_memory_saver
    return PrefillGraphs(runner, num_sms, enable_memory_saver=memory_saver, reuse_output_buffer=True)
