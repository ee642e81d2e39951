"""k_norm, RoPE and the KV write of the drafter's context, all layers in one launch.

Shapes: T tokens, L drafter layers, H KV heads of this rank, D head dimension.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.reference.write_context_kv import KVBuffers


@triton.jit
def _write_context_kv_kernel(
    kv,
    kv_stride_token,
    k_norm_weight,
    eps,
    cos_sin_cache,
    positions,
    cache_loc,
    accept_lens,
    block_size,
    k_ptrs,
    v_ptrs,
    HAS_ACCEPT_LENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    if HAS_ACCEPT_LENS and token % block_size >= tl.load(accept_lens + token // block_size):
        return
    head = tl.arange(0, PADDED_HEADS)[:, None]
    dim = tl.arange(0, PADDED_HALF)[None, :]
    valid = (head < HEADS) & (dim < HALF)
    row_size = HEADS * 2 * HALF
    low = head * 2 * HALF + dim
    high = low + HALF

    k = kv + token * kv_stride_token + layer * 2 * row_size
    k_low = tl.load(k + low, mask=valid, other=0.0).to(tl.float32)
    k_high = tl.load(k + high, mask=valid, other=0.0).to(tl.float32)
    square_sum = tl.sum(k_low * k_low + k_high * k_high, axis=1)[:, None]
    scale = tl.rsqrt(square_sum / (2 * HALF) + eps)
    weight = k_norm_weight + layer * 2 * HALF
    in_half = dim < HALF
    k_low = k_low * scale * tl.load(weight + dim, mask=in_half, other=0.0).to(tl.float32)
    k_high = k_high * scale * tl.load(weight + HALF + dim, mask=in_half, other=0.0).to(tl.float32)
    # The block path rounds between its norm and its rotation; context keys take the same steps.
    k_low = k_low.to(kv.dtype.element_ty).to(tl.float32)
    k_high = k_high.to(kv.dtype.element_ty).to(tl.float32)

    angles = cos_sin_cache + tl.load(positions + token).to(tl.int64) * 2 * HALF
    cos = tl.load(angles + dim, mask=in_half, other=0.0).to(tl.float32)
    sin = tl.load(angles + HALF + dim, mask=in_half, other=0.0).to(tl.float32)

    slot = tl.load(cache_loc + token).to(tl.int64) * row_size
    k_out = tl.load(k_ptrs + layer).to(tl.pointer_type(kv.dtype.element_ty)) + slot
    v_out = tl.load(v_ptrs + layer).to(tl.pointer_type(kv.dtype.element_ty)) + slot
    tl.store(k_out + low, (k_low * cos - k_high * sin).to(kv.dtype.element_ty), mask=valid)
    tl.store(k_out + high, (k_high * cos + k_low * sin).to(kv.dtype.element_ty), mask=valid)
    v = k + row_size
    tl.store(v_out + low, tl.load(v + low, mask=valid), mask=valid)
    tl.store(v_out + high, tl.load(v + high, mask=valid), mask=valid)


def write_context_kv(
    kv: torch.Tensor,
    k_norm_weight: torch.Tensor,
    eps: float,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    cache_loc: torch.Tensor,
    accept_lens: torch.Tensor | None,
    buffers: KVBuffers,
) -> None:
    """See :func:`sglang_dflash.reference.write_context_kv.write_context_kv`; the buffers hold `kv.dtype`."""
    num_tokens, num_layers, _, heads, head_dim = kv.shape
    assert kv.stride(-1) == 1 and kv.stride(1) == 2 * heads * head_dim
    if not num_tokens:
        return
    _write_context_kv_kernel[(num_tokens, num_layers)](
        kv,
        kv.stride(0),
        k_norm_weight,
        eps,
        cos_sin_cache,
        positions,
        cache_loc,
        accept_lens,
        1 if accept_lens is None else num_tokens // accept_lens.shape[0],
        buffers.k_ptrs,
        buffers.v_ptrs,
        HAS_ACCEPT_LENS=accept_lens is not None,
        HEADS=heads,
        HALF=head_dim // 2,
        PADDED_HEADS=triton.next_power_of_2(heads),
        PADDED_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=4 if heads * head_dim >= 512 else 1,
    )
