"""SGLang's FA3 backend on a machine without FA3: FA3's two functions in torch, and graphs of whole prefills.

They compute the results of FA3's, and check the arguments that SGLang and `sglang_dflash.attention.fa3` pass.
"""

import sys
from contextlib import contextmanager
from types import ModuleType

import sgl_kernel
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
from support.attention_reference import dense_attention

from sglang_dflash.attention import fa3

# Attribute of a schedule that carries the arguments from one function to the other.
_SCHEDULED = "_scheduled_with"


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads: int,
    num_heads_k: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype,
    headdim_v: int,
    cu_seqlens_q: torch.Tensor,
    page_size: int,
    causal: bool,
    window_size: tuple[int, int],
    has_softcap: bool,
    num_splits: int,
) -> torch.Tensor:
    """Return a schedule with an attribute: the arguments that a call of `flash_attn_with_kvcache` must share."""
    schedule = torch.empty(batch_size + 1, dtype=torch.int32)
    shape = (batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, page_size)
    lens = (cache_seqlens.data_ptr(), cu_seqlens_q.data_ptr())
    setattr(schedule, _SCHEDULED, (shape, lens, qkv_dtype, causal, window_size, has_softcap, num_splits))
    return schedule


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    num_splits: int,
    scheduler_metadata: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    **unused,
) -> torch.Tensor:
    """Attend: q [T, heads, head_dim], caches [pages, page_size, kv_heads, head_dim], page_table [bs, pages] int32.

    Returns:
        [T, heads, head_dim].
    """
    page_size, kv_heads, head_dim = k_cache.shape[1:]
    bs, num_pages = page_table.shape
    # All layers of a graph have a schedule, and no other layers do.
    assert (scheduler_metadata is None) == (fa3._recording is None)
    if scheduler_metadata is not None:
        shape = (bs, max_seqlen_q, num_pages * page_size, q.shape[1], kv_heads, head_dim, v_cache.shape[-1], page_size)
        lens = (cache_seqlens.data_ptr(), cu_seqlens_q.data_ptr())
        call = (shape, lens, k_cache.dtype, causal, window_size, softcap > 0, num_splits)
        assert getattr(scheduler_metadata, _SCHEDULED) == call
    left, right = window_size
    assert (cu_seqlens_q.diff() <= max_seqlen_q).all() and (right == 0 if causal and left >= 0 else right == left)
    # FA3 would read pages of another request.
    assert (cache_seqlens <= num_pages * page_size).all()
    out = torch.empty_like(q) if out is None else out
    for table, kv_len, begin, end in zip(page_table, cache_seqlens, cu_seqlens_q[:-1], cu_seqlens_q[1:], strict=True):
        pages = table[: -(-kv_len // page_size)].long()
        keys, values = (cache[pages].flatten(0, 1)[:kv_len] for cache in (k_cache, v_cache))
        # FA3's window does not count the query's own key.
        window = None if left < 0 else left + 1
        out[begin:end] = dense_attention(q[begin:end], keys, values, window=window, causal=causal, scale=softmax_scale)
    return out


def provide() -> None:
    """Let SGLang import its FA3 backend."""
    module = ModuleType("sgl_kernel.flash_attn")
    module.flash_attn_with_kvcache, module.get_scheduler_metadata = flash_attn_with_kvcache, get_scheduler_metadata
    module.flash_attn_varlen_func = None
    sys.modules[module.__name__] = module
    sgl_kernel.merge_state_v2 = None


def install() -> None:
    """Let SGLang have its FA3 backend, with this package's hook."""
    provide()
    from sglang.srt.layers.attention import flashattention_backend

    flashattention_backend.flash_attn_with_kvcache = flash_attn_with_kvcache
    flashattention_backend.get_device_capability = lambda: (9, 0)
    backend = flashattention_backend.FlashAttentionBackend
    original = backend.forward_extend
    backend.forward_extend = lambda *args, **kwargs: fa3.attend(original, *args, **kwargs)
    ATTENTION_BACKENDS["fa3"] = backend
    call_in_replays(FullCudaGraphBackend)


def call_in_replays(graphs: type[FullCudaGraphBackend]) -> None:
    """Have graphs call in a replay what they would record."""

    @contextmanager
    def capture_session(self, stream):
        yield

    def capture_one(self, shape_key, forward_fn, capture_inputs=None, post_warmup_hook=None):
        forward_fn()
        self._graphs[shape_key] = forward_fn

    def replay(self, shape_key, static_forward_batch, **kwargs):
        return self._graphs[shape_key]()

    graphs.capture_session, graphs.capture_one, graphs.replay = capture_session, capture_one, replay
