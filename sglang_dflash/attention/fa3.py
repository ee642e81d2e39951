"""FA3's attention of blocks, without work that every layer would repeat.

SGLang copies the queries of each layer, and passes no schedule, so that each call launches a kernel that computes one.
FA3 can read queries from the projection's output. A schedule depends on lengths and masks only, so layers with the same
mask share one.

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

# Schedules of the cycle that is being recorded, by what they depend on. Forwards of a process run one at a time.
_schedules: dict[tuple, torch.Tensor] | None = None


@contextmanager
def shared_schedules() -> Iterator[None]:
    """Share schedules among layers inside the `with` block, in which lengths must not change."""
    global _schedules
    _schedules = {}
    try:
        yield
    finally:
        _schedules = None


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
    if _schedules is None or not _is_plain(backend, q, layer, forward_batch, options):
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **options)
    metadata = backend.forward_metadata
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
    return backend.flash_attn_with_kvcache(
        q=q.view(-1, layer.tp_q_head_num, layer.head_dim),
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=page_table,
        cache_seqlens=metadata.cache_seqlens_int32,
        cu_seqlens_q=metadata.cu_seqlens_q,
        max_seqlen_q=metadata.max_seq_len_q,
        softmax_scale=layer.scaling,
        causal=causal,
        window_size=window,
        softcap=layer.logit_cap,
        scheduler_metadata=_schedule(backend, layer, causal, window, page_table),
        num_splits=backend.num_splits,
    ).view(-1, layer.tp_q_head_num * layer.v_head_dim)


def _schedule(backend, layer: RadixAttention, causal: bool, window: tuple[int, int], page_table: torch.Tensor):
    metadata = backend.forward_metadata
    heads = (layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim, layer.v_head_dim)
    key = (metadata.cache_seqlens_int32.data_ptr(), *heads, causal, window, layer.logit_cap > 0)
    if key not in _schedules:
        # With the arguments of the attention, both choose the same number of splits.
        _schedules[key] = backend._get_scheduler_metadata(
            batch_size=metadata.cache_seqlens_int32.shape[0],
            max_seqlen_q=metadata.max_seq_len_q,
            max_seqlen_k=page_table.shape[1] * backend.page_size,
            num_heads=layer.tp_q_head_num,
            num_heads_k=layer.tp_k_head_num,
            headdim=layer.head_dim,
            headdim_v=layer.v_head_dim,
            cache_seqlens=metadata.cache_seqlens_int32,
            qkv_dtype=backend.kv_cache_dtype,
            cu_seqlens_q=metadata.cu_seqlens_q,
            page_size=backend.page_size,
            causal=causal,
            window_size=window,
            has_softcap=layer.logit_cap > 0,
            num_splits=backend.num_splits,
        )
    return _schedules[key]


def _is_sliding(layer: RadixAttention) -> bool:
    return layer.sliding_window_size is not None and layer.sliding_window_size > -1


def _is_plain(backend, q: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch, options: dict) -> bool:
    """Return whether this is attention of blocks over KV in the model's dtype, without options unknown to `attend`."""
    return (
        forward_batch.forward_mode.is_target_verify()
        and all(option is None or option is False for option in options.values())
        and backend.fa_impl_ver == 3
        and backend.kv_cache_dtype == q.dtype
        # SGLang passes scales to FA3 wherever a flag names the KV's dtype, even the model's.
        and (backend.kv_cache_dtype_str == "auto" or layer.k_scale is None)
        and not backend.use_mla
        and backend.local_attn_builder is None
        and not backend.fa_skip_kv_cache
        and not backend._disable_scheduler_metadata_precompute
        and not layer.is_cross_attention
        and layer.attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY)
        and forward_batch._attn_output is None
    )
