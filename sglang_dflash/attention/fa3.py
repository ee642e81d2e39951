"""FA3's attention of blocks, and of prefills in one CUDA graph, without work that every layer would repeat.

SGLang copies the queries of each layer, and passes no schedule, so that each call launches a kernel that computes one.
FA3 can read queries from the projection's output. A schedule depends on lengths and masks only, so layers with the same
mask share one.

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode


@dataclass(frozen=True)
class _Recording:
    """A forward that is being recorded.

    Attributes:
        num_requests: the requests of a prefill, the first ones of its metadata. None: it is a cycle with blocks of all.
        num_splits: of the keys of a tile of queries, at most. None: the backend's.
        schedules: by what they depend on.
    """

    num_requests: int | None = None
    num_splits: int | None = None
    schedules: dict[tuple, torch.Tensor] = field(default_factory=dict)

    @property
    def is_prefill(self) -> bool:
        return self.num_requests is not None


# Forwards of a process run one at a time.
_recording: _Recording | None = None


@contextmanager
def shared_schedules(num_requests: int | None = None, num_splits: int | None = None) -> Iterator[None]:
    """Share schedules among layers inside the `with` block, in which lengths must not change.

    Args:
        num_requests: of a prefill, the first requests of the metadata, which have all tokens. None: it is a cycle.
        num_splits: of a prefill, of the keys of a tile of queries, at most. FA3's own choice (0) would be another one
            in the schedule than in the attention: a schedule does not know that all requests together have
            `max_seqlen_q` tokens.
    """
    global _recording
    _recording = _Recording(num_requests, num_splits)
    try:
        yield
    finally:
        _recording = None


def attend(
    original,
    backend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: RadixAttention,
    forward_batch: ForwardBatch,
    save_kv_cache: bool = True,
    **options,
) -> torch.Tensor:
    """AROUND `FlashAttentionBackend.forward_extend`: q [T, heads * head_dim], k and v [T, KV heads, head_dim]."""
    recording = _recording
    if recording is None or not _is_plain(recording, backend, q, layer, forward_batch, options):
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **options)
    metadata, num_requests = backend.forward_metadata, recording.num_requests
    if save_kv_cache and k is not None:
        slots = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=metadata.swa_out_cache_loc)
        backend.token_to_kv_pool.set_kv_buffer(layer, slots, k, v, layer.k_scale, layer.v_scale)
    k_cache, v_cache = backend.get_paged_mha_kv_cache(layer)
    causal = layer.attn_type == AttentionType.DECODER
    window, page_table = (-1, -1), metadata.page_table
    if _is_sliding(layer):
        window = (layer.sliding_window_size, 0 if causal else layer.sliding_window_size)
        if backend.use_sliding_window_kv_pool:
            page_table = metadata.swa_page_table
    # Attention and its schedule must have the same number of splits.
    arguments = {
        "cache_seqlens": metadata.cache_seqlens_int32[:num_requests],
        "cu_seqlens_q": metadata.cu_seqlens_q[: None if num_requests is None else num_requests + 1],
        "max_seqlen_q": metadata.max_seq_len_q,
        "causal": causal,
        "window_size": window,
        "num_splits": backend.num_splits if recording.num_splits is None else recording.num_splits,
    }
    page_table = page_table[:num_requests]
    heads = (-1, layer.tp_q_head_num, layer.v_head_dim)
    output = forward_batch._attn_output
    return backend.flash_attn_with_kvcache(
        q=q.view(-1, layer.tp_q_head_num, layer.head_dim),
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=page_table,
        softmax_scale=layer.scaling,
        softcap=layer.logit_cap,
        scheduler_metadata=_schedule(recording, backend, layer, page_table, arguments),
        out=None if output is None else output.view(heads),
        **arguments,
    ).view(-1, layer.tp_q_head_num * layer.v_head_dim)


def _schedule(
    recording: _Recording, backend, layer: RadixAttention, page_table: torch.Tensor, arguments: dict
) -> torch.Tensor:
    heads = (layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim, layer.v_head_dim)
    lens, has_softcap = arguments["cache_seqlens"], layer.logit_cap > 0
    key = (lens.data_ptr(), *heads, arguments["causal"], arguments["window_size"], has_softcap)
    if key not in recording.schedules:
        recording.schedules[key] = backend._get_scheduler_metadata(
            batch_size=lens.shape[0],
            max_seqlen_k=page_table.shape[1] * backend.page_size,
            num_heads=layer.tp_q_head_num,
            num_heads_k=layer.tp_k_head_num,
            headdim=layer.head_dim,
            headdim_v=layer.v_head_dim,
            qkv_dtype=backend.kv_cache_dtype,
            page_size=backend.page_size,
            has_softcap=has_softcap,
            **arguments,
        )
    return recording.schedules[key]


def _is_sliding(layer: RadixAttention) -> bool:
    return layer.sliding_window_size is not None and layer.sliding_window_size > -1


def is_plain_backend(backend, dtype: torch.dtype) -> bool:
    """Return whether attention of a target in `dtype` can be that of :func:`attend`."""
    return (
        backend.fa_impl_ver == 3
        and backend.kv_cache_dtype == dtype
        and not backend.use_mla
        and backend.local_attn_builder is None
        and not backend.fa_skip_kv_cache
        and not backend._disable_scheduler_metadata_precompute
    )


def _is_plain(
    recording: _Recording,
    backend,
    q: torch.Tensor,
    layer: RadixAttention,
    forward_batch: ForwardBatch,
    options: dict,
) -> bool:
    """Return whether this is attention of what is recorded, over KV in the model's dtype, without unknown options."""
    mode = forward_batch.forward_mode
    return (
        (mode == ForwardMode.EXTEND if recording.is_prefill else mode.is_target_verify())
        and is_plain_backend(backend, q.dtype)
        and all(option is None or option is False for option in options.values())
        # SGLang passes scales to FA3 wherever a flag names the KV's dtype, even the model's.
        and (backend.kv_cache_dtype_str == "auto" or layer.k_scale is None)
        and not layer.is_cross_attention
        and layer.attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY)
    )
