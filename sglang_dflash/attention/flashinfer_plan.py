"""FlashInfer's plan of a batch of blocks, computed inside the CUDA graph.

FlashInfer plans on the host. It reads the lengths of all requests, which waits for the GPU, splits their KV among
thread blocks, and copies the split to the GPU. Here the GPU computes the split, so that no cycle waits for the one
before. FlashInfer's kernel derives a part of the split again, so ours must be equal in every entry. Both are compared
when the graph is captured.

In a CUDA graph FlashInfer assumes that any row may belong to any request, unless `uniform_q_len` says that all requests
have the same number of rows. SGLang has no option for it. With it, a tile needs no more rows than a block.

With `--enable-deterministic-inference` no KV is split. FlashInfer's chunks depend on all lengths of a batch, and the
order of a row's sums depends on the chunks. SGLang does the same for plain decoding in graphs
(`disable_cuda_graph_kv_split`). The plan then depends on the number of blocks only, and is computed once.

Shapes: bs requests, B tokens of a block.
"""

from __future__ import annotations

from functools import partial

import flashinfer
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend, WrapperDispatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_dflash import ops
from sglang_dflash.errors import ConfigError
from sglang_dflash.types import KVSplit

# `PrefillPlanInfo::ToVector` in flashinfer/attention/scheduler.cuh.
_PLAN_INFO = (
    "padded_batch_size",
    "total_num_rows",
    "total_num_rows_offset",
    "cta_tile_q",
    "request_indices_offset",
    "qo_tile_indices_offset",
    "kv_tile_indices_offset",
    "merge_indptr_offset",
    "o_indptr_offset",
    "kv_chunk_size_ptr_offset",
    "v_offset",
    "s_offset",
    "block_valid_mask_offset",
    "enable_cuda_graph",
    "split_kv",
)
# Thread blocks on each multiprocessor that `PrefillPlanImpl`, in the same file, plans for.
_BLOCKS_PER_SM = 2
_INT32_BYTES = 4


def _leave_output_unfilled(wrapper: flashinfer.BatchPrefillWithPagedKVCacheWrapper) -> None:
    """Keep FlashInfer from clearing its output first. It does so for rows that belong to no request; here all do."""
    run = partial(type(wrapper).run, wrapper)

    def run_into_empty(q: torch.Tensor, kv_cache: tuple[torch.Tensor, torch.Tensor], **options) -> torch.Tensor:
        return run(q, kv_cache, out=q.new_empty((*q.shape[:-1], kv_cache[1].shape[-1])), **options)

    wrapper.run = run_into_empty


class FlashInferPlan:
    """FlashInfer's :class:`sglang_dflash.attention.plan.BlockPlan`.

    A backend has one wrapper for its full layers and, if it has sliding layers, another one before it for them.
    """

    needs_host_lens = False

    def __init__(self, backend: FlashInferAttnBackend, block_size: int) -> None:
        updater = backend.indices_updater_prefill
        # Without `--enable-unified-memory`, which is refused, `req_to_token` has the slots themselves.
        assert not backend.kv_index_translator.is_translating
        self._backend, self._updater, self._block_size = backend, updater, block_size
        self._splits_kv = not backend.enable_deterministic
        self._req_to_token = backend.req_to_token_pool.req_to_token
        self._windows, self._slot_maps = [None], [None]
        if backend.dispatch_reason == WrapperDispatch.SLIDING_WINDOW:
            swa_pool = backend._swa_kv_pool
            self._windows.insert(0, updater.sliding_window_size)
            self._slot_maps.insert(0, None if swa_pool is None else swa_pool.full_to_swa_index_mapping)
        num_sms = torch.cuda.get_device_properties(backend.kv_last_page_len.device).multi_processor_count
        self._max_entries = _BLOCKS_PER_SM * num_sms // updater.num_kv_heads

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
        is_capturing = torch.cuda.is_current_stream_capturing()
        for i, (window, slot_map) in enumerate(zip(self._windows, self._slot_maps, strict=True)):
            if not is_capturing:
                if self._splits_kv:
                    self._check(i, bs)
                else:
                    self._plan_on_host(i, [1] * bs)
                _leave_output_unfilled(backend.prefill_cuda_graph_metadata[bs][i])
            if self._splits_kv:
                self._split(i, batch.seq_lens)
            ops.index_kv(
                self._req_to_token,
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
        pass

    def _split(self, i: int, seq_lens: torch.Tensor) -> KVSplit:
        """Split the KV of wrapper `i` on the GPU, for contexts of `seq_lens`, [bs] int64."""
        updater, bs = self._updater, seq_lens.shape[0]
        wrapper = self._backend.prefill_cuda_graph_metadata[bs][i]
        info = dict(zip(_PLAN_INFO, wrapper._plan_info, strict=True))
        num_slots, num_rows = info["padded_batch_size"], bs * self._block_size

        def ints(name: str, n: int) -> torch.Tensor:
            start = info[f"{name}_offset"]
            return wrapper._int_workspace_buffer[start : start + n * _INT32_BYTES].view(torch.int32)

        mask_start = info["block_valid_mask_offset"]
        split = KVSplit(
            request_indices=ints("request_indices", num_slots),
            qo_tile_indices=ints("qo_tile_indices", num_slots),
            kv_tile_indices=ints("kv_tile_indices", num_slots),
            block_valid_mask=wrapper._int_workspace_buffer[mask_start : mask_start + num_slots].view(torch.bool),
            o_indptr=ints("o_indptr", bs + 1),
            merge_indptr=ints("merge_indptr", num_rows + 1),
            kv_chunk_size=ints("kv_chunk_size_ptr", 1),
        )
        ops.split_kv(
            seq_lens,
            self._windows[i],
            self._block_size,
            updater.num_qo_heads // updater.num_kv_heads,
            info["cta_tile_q"],
            self._max_entries,
            split,
        )
        return split

    def _check(self, i: int, bs: int) -> None:
        """Raise :class:`ConfigError` unless FlashInfer's split of contexts of many lengths equals `_split`'s."""
        longest = self._req_to_token.shape[1] - self._block_size
        seq_lens = [1 + 7919 * request % longest for request in range(bs)]
        self._plan_on_host(i, seq_lens)
        workspace = self._backend.prefill_cuda_graph_metadata[bs][i]._int_workspace_buffer
        theirs = workspace.clone()
        split = self._split(i, torch.tensor(seq_lens, device=workspace.device))
        # Entries that are not written keep their values, so the whole workspace must be equal.
        if not torch.equal(workspace, theirs):
            raise ConfigError(
                f"FlashInfer {flashinfer.__version__} does not split the KV of {bs} blocks as sglang-dflash does, in "
                f"chunks of {int(split.kv_chunk_size)}: choose another --attention-backend and "
                "--speculative-draft-attention-backend, or install the FlashInfer that SGLang requires."
            )

    def _plan_on_host(self, i: int, seq_lens: list[int]) -> None:
        """Plan wrapper `i` as its `plan` does, with tiles of one block's rows.

        SGLang has called `plan` for the same blocks without a context.

        Args:
            seq_lens: the context of each block.
        """
        updater, block_size, window = self._updater, self._block_size, self._windows[i]
        bs = len(seq_lens)
        wrapper = self._backend.prefill_cuda_graph_metadata[bs][i]
        contexts = seq_lens if window is None else [min(seq_len, window) for seq_len in seq_lens]
        kv_lens = torch.tensor(contexts, dtype=torch.int32) + block_size
        wrapper._plan_info = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
            torch.arange(0, (bs + 1) * block_size, block_size, dtype=torch.int32),
            torch.nn.functional.pad(kv_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            kv_lens,
            bs * block_size,
            bs,
            updater.num_qo_heads,
            updater.num_kv_heads,
            1,  # page_size
            True,  # enable_cuda_graph
            updater.head_dim,  # of queries and keys
            updater.head_dim,  # of values
            False,  # causal
            -1 if window is None else window,
            -1,  # fixed_split_size
            not self._splits_kv,  # disable_split_kv
            0,  # num_colocated_ctas
            block_size,  # uniform_q_len
        )
