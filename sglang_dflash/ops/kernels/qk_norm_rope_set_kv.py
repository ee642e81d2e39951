"""q_norm, k_norm, RoPE and the KV write of one layer for a block's tokens, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_dflash.ops.kernels import pdl
from sglang_dflash.ops.kernels.norm_rope import norm_rope

# Per thread block. With a head dimension of 128 a thread reads 16 bytes of bfloat16 at a time.
_HEADS, _WARPS = 8, 2


@triton.jit
def _weight(q_norm_weight, k_norm_weight, is_query, dim, valid):
    q = tl.load(q_norm_weight + dim, mask=valid, other=0.0)
    k = tl.load(k_norm_weight + dim, mask=valid, other=0.0)
    return tl.where(is_query, q, k).to(tl.float32)


@triton.jit
def _qk_norm_rope_set_kv_kernel(
    qkv,
    qkv_stride,
    q_norm_weight,
    k_norm_weight,
    eps,
    cos_sin_cache,
    positions,
    cache_loc,
    k_buffer,
    v_buffer,
    q_out,
    k_out,
    v_out,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    IS_EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    if IS_EARLY:
        # This kernel may start while the projection still runs, whose output is complete only after the wait.
        gdc_wait()
    if PDL:
        # The attention kernel may start now; it waits for this one's output itself.
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, PADDED_HALF)[None, :]
    in_half = dim < HALF
    valid = (head < Q_HEADS + KV_HEADS) & in_half
    is_query = valid & (head < Q_HEADS)
    is_key = valid & (head >= Q_HEADS)

    # Query heads lie before key heads. All loads come before the first store, so that none waits for a store.
    at = qkv + token * qkv_stride + head * 2 * HALF + dim
    value_at = at + KV_HEADS * 2 * HALF
    low = tl.load(at, mask=valid, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=valid, other=0.0).to(tl.float32)
    value_low = tl.load(value_at, mask=is_key)
    value_high = tl.load(value_at + HALF, mask=is_key)
    angles = cos_sin_cache + tl.load(positions + token).to(tl.int64) * 2 * HALF + dim
    cos = tl.load(angles, mask=in_half, other=0.0).to(tl.float32)
    sin = tl.load(angles + HALF, mask=in_half, other=0.0).to(tl.float32)
    slot = tl.load(cache_loc + token).to(tl.int64)

    low_weight = _weight(q_norm_weight, k_norm_weight, head < Q_HEADS, dim, in_half)
    high_weight = _weight(q_norm_weight, k_norm_weight, head < Q_HEADS, dim + HALF, in_half)
    low, high = norm_rope(low, high, low_weight, high_weight, eps, cos, sin, HALF, qkv.dtype.element_ty)

    q_at = (token * Q_HEADS + head) * 2 * HALF + dim
    tl.store(q_out + q_at, low, mask=is_query)
    tl.store(q_out + q_at + HALF, high, mask=is_query)
    kv_at = (token * KV_HEADS + head - Q_HEADS) * 2 * HALF + dim
    tl.store(k_out + kv_at, low, mask=is_key)
    tl.store(k_out + kv_at + HALF, high, mask=is_key)
    tl.store(v_out + kv_at, value_low, mask=is_key)
    tl.store(v_out + kv_at + HALF, value_high, mask=is_key)
    stored_at = (slot * KV_HEADS + head - Q_HEADS) * 2 * HALF + dim
    tl.store(k_buffer + stored_at, low, mask=is_key)
    tl.store(k_buffer + stored_at + HALF, high, mask=is_key)
    tl.store(v_buffer + stored_at, value_low, mask=is_key)
    tl.store(v_buffer + stored_at + HALF, value_high, mask=is_key)


def qk_norm_rope_set_kv(
    qkv: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    eps: float,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    cache_loc: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    is_early: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`sglang_dflash.ops.reference.qk_norm_rope_set_kv.qk_norm_rope_set_kv`."""
    num_tokens, width = qkv.shape
    kv_heads, head_dim = k_buffer.shape[1:]
    q_heads = width // head_dim - 2 * kv_heads
    assert qkv.stride(1) == 1 and k_buffer.is_contiguous() and v_buffer.is_contiguous()
    assert k_buffer.dtype == v_buffer.dtype == qkv.dtype
    out = tuple(qkv.new_empty((num_tokens, heads * head_dim)) for heads in (q_heads, kv_heads, kv_heads))
    if not num_tokens:
        return out
    pdl_is_available = pdl.is_available(qkv.device)
    is_early = is_early and pdl_is_available
    _qk_norm_rope_set_kv_kernel[(num_tokens, triton.cdiv(q_heads + kv_heads, _HEADS))](
        qkv,
        qkv.stride(0),
        q_norm_weight,
        k_norm_weight,
        eps,
        cos_sin_cache,
        positions,
        cache_loc,
        k_buffer,
        v_buffer,
        *out,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        HEADS=_HEADS,
        PADDED_HALF=triton.next_power_of_2(head_dim // 2),
        IS_EARLY=is_early,
        PDL=pdl_is_available,
        num_warps=_WARPS,
        launch_pdl=is_early,
    )
    return out
