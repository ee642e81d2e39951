"""FlashInfer's plan of a batch of blocks, without waiting for the GPU and seldom made.

FlashInfer splits the KV of every request among thread blocks on the host, by the request's length, and attends up to
the lengths in its `kv_indptr`, on the GPU. A split for longer KV than there is leaves some of them without work and
changes no result beyond the order of a sum. So the split is made for more than the longest that a request may have,
from bounds that the scheduler knows without waiting, and again only when a request has outgrown it; what attention
reads is laid out inside the graph.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend, WrapperDispatch, fast_prefill_plan
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_dflash import ops

# KV that a request is planned for beyond its own: at least so many tokens, or this part of it.
_MIN_SLACK = 256
_SLACK_DIVISOR = 8


class FlashInferPlan:
    """A :class:`sglang_dflash.block_plan.BlockPlan`.

    A backend has one wrapper for its full layers and, before it, one for its sliding layers, if it has any.
    """

    needs_host_lens = True

    def __init__(self, backend: FlashInferAttnBackend, block_size: int) -> None:
        updater = backend.indices_updater_prefill
        self._backend, self._updater, self._block_size = backend, updater, block_size
        self._windows, self._slot_maps = [None], [None]
        if backend.dispatch_reason == WrapperDispatch.SLIDING_WINDOW:
            swa_pool = backend._swa_kv_pool
            self._windows.insert(0, updater.sliding_window_size)
            self._slot_maps.insert(0, None if swa_pool is None else swa_pool.full_to_swa_index_mapping)
        # By captured batch size: the lengths that its wrappers are planned for.
        self._planned: dict[int, list[int]] = {}
        self._copied = torch.cuda.Event()

    @staticmethod
    def supports(backend: AttentionBackend) -> bool:
        return (
            type(backend) is FlashInferAttnBackend
            and backend.dispatch_reason != WrapperDispatch.CROSS_ATTENTION
            and backend.prefill_backend == "fa2"
            and (backend._swa_kv_pool is None or backend._swa_kv_pool.full_to_swa_index_mapping is not None)
        )

    def capture(self, batch: ForwardBatch) -> None:
        self._backend.init_forward_metadata_out_graph(batch, in_capture=True)

    def record(self, batch: ForwardBatch) -> None:
        backend, bs = self._backend, batch.batch_size
        for i, (window, slot_map) in enumerate(zip(self._windows, self._slot_maps, strict=True)):
            ops.index_kv(
                self._updater.req_to_token,
                batch.req_pool_indices,
                batch.seq_lens,
                window,
                self._block_size,
                slot_map,
                backend.kv_indptr[i][: bs + 1],
                backend.cuda_graph_kv_indices[i],
            )
        if backend._swa_kv_pool is not None:
            slots = backend._swa_kv_pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
            backend.cuda_graph_swa_out_cache_loc[: slots.shape[0]].copy_(slots)

    def before_replay(self, batch: ForwardBatch) -> None:
        bs, kv_lens = batch.batch_size, batch.seq_lens_cpu.tolist()
        planned = self._planned.get(bs, [0] * bs)
        # Much longer than the requests that are there now, a plan splits them too little.
        is_tight = sum(planned) <= 2 * (sum(kv_lens) + _MIN_SLACK * bs)
        if is_tight and all(kv_len <= limit for kv_len, limit in zip(kv_lens, planned, strict=True)):
            return
        self._planned[bs] = [kv_len + max(_MIN_SLACK, kv_len // _SLACK_DIVISOR) for kv_len in kv_lens]
        # The last plan must have left its pinned memory.
        self._copied.synchronize()
        for i, window in enumerate(self._windows):
            self._plan(i, bs, window, self._planned[bs])
        self._copied.record()

    def _plan(self, i: int, bs: int, window: int | None, kv_lens: list[int]) -> None:
        """Plan wrapper `i` of a batch size, as `FlashInferIndicesUpdaterPrefill.call_begin_forward` does."""
        backend, updater, block_size = self._backend, self._updater, self._block_size
        if window is not None:
            kv_lens = [min(kv_len, window + block_size) for kv_len in kv_lens]
        kv_lens_host = torch.tensor(kv_lens, dtype=torch.int32)
        kv_indptr_host = torch.zeros(bs + 1, dtype=torch.int32)
        torch.cumsum(kv_lens_host, dim=0, out=kv_indptr_host[1:])
        fast_prefill_plan(
            backend.prefill_cuda_graph_metadata[bs][i],
            # These are the wrapper's own buffers; the graph fills them.
            backend.cuda_graph_qo_indptr[i][: bs + 1],
            backend.kv_indptr[i][: bs + 1],
            backend.cuda_graph_kv_indices[i][:0],
            backend.kv_last_page_len[:bs],
            updater.num_qo_heads,
            updater.num_kv_heads,
            updater.head_dim,
            1,
            window_left=-1 if window is None else window,
            q_data_type=updater.q_data_type,
            kv_data_type=updater.data_type,
            qo_indptr_host=torch.arange(0, (bs + 1) * block_size, block_size, dtype=torch.int32),
            kv_indptr_host=kv_indptr_host,
            kv_lens_host=kv_lens_host,
            max_q_len=block_size,
            max_kv_len=max(kv_lens),
        )
