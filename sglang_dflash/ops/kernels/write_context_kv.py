"""k_norm, RoPE and the KV write of the drafter's context, all layers in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.kernels.norm_rope import norm_rope
from sglang_dflash.types import KVBuffers

_POOL_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}
# The byte that torch writes for a value that is too large. For e5m2 it is infinity. e4m3fn has no infinity; its byte is
# NaN or the largest number, depending on the release of torch.
_OVERFLOW = {
    dtype: int(torch.tensor(torch.inf).to(dtype).view(torch.uint8))
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
}


@triton.jit
def _to_pool(x, POOL_DTYPE: tl.constexpr, OVERFLOW: tl.constexpr):
    """Convert x to the pool's dtype; fp8 is returned as uint8, bit for bit as torch's `.to`.

    Triton's own conversion always saturates, and not every GPU supports it.
    """
    if not POOL_DTYPE.is_fp8():
        return x.to(POOL_DTYPE)
    else:
        MANTISSA: tl.constexpr = POOL_DTYPE.fp_mantissa_width
        BIAS: tl.constexpr = POOL_DTYPE.exponent_bias
        x = x.to(tl.float32)
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Round half to even: add just under half of the last kept bit, and 1 more if that bit is set.
        odd = (magnitude >> (23 - MANTISSA)) & 1
        rounded = magnitude - ((127 - BIAS) << 23) + ((1 << (22 - MANTISSA)) - 1) + odd
        normal = tl.minimum(rounded >> (23 - MANTISSA), OVERFLOW)
        # The last bit of this sum equals the last bit of a subnormal number, so the addition rounds to it.
        subnormal = (tl.abs(x) + (1 << (24 - BIAS - MANTISSA))).to(tl.int32, bitcast=True) & 0xFF
        result = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
        result = tl.where(magnitude > 0x7F800000, 0x7F, result)
        return (result | ((bits >> 24) & 0x80)).to(tl.uint8)


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
    POOL_DTYPE: tl.constexpr,
    OVERFLOW: tl.constexpr,
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
    in_half = dim < HALF
    weight = k_norm_weight + layer * 2 * HALF
    low_weight = tl.load(weight + dim, mask=in_half, other=0.0).to(tl.float32)
    high_weight = tl.load(weight + HALF + dim, mask=in_half, other=0.0).to(tl.float32)
    angles = cos_sin_cache + tl.load(positions + token).to(tl.int64) * 2 * HALF
    cos = tl.load(angles + dim, mask=in_half, other=0.0).to(tl.float32)
    sin = tl.load(angles + HALF + dim, mask=in_half, other=0.0).to(tl.float32)
    k_low, k_high = norm_rope(k_low, k_high, low_weight, high_weight, eps, cos, sin, HALF, kv.dtype.element_ty)

    slot = tl.load(cache_loc + token).to(tl.int64) * row_size
    STORED: tl.constexpr = tl.uint8 if POOL_DTYPE.is_fp8() else POOL_DTYPE
    k_out = tl.load(k_ptrs + layer).to(tl.pointer_type(STORED)) + slot
    v_out = tl.load(v_ptrs + layer).to(tl.pointer_type(STORED)) + slot
    tl.store(k_out + low, _to_pool(k_low, POOL_DTYPE, OVERFLOW), mask=valid)
    tl.store(k_out + high, _to_pool(k_high, POOL_DTYPE, OVERFLOW), mask=valid)
    v = k + row_size
    tl.store(v_out + low, _to_pool(tl.load(v + low, mask=valid), POOL_DTYPE, OVERFLOW), mask=valid)
    tl.store(v_out + high, _to_pool(tl.load(v + high, mask=valid), POOL_DTYPE, OVERFLOW), mask=valid)


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
    """See :func:`sglang_dflash.ops.reference.write_context_kv.write_context_kv`."""
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
        POOL_DTYPE=_POOL_DTYPES[buffers.dtype],
        OVERFLOW=_OVERFLOW.get(buffers.dtype),
        HAS_ACCEPT_LENS=accept_lens is not None,
        HEADS=heads,
        HALF=head_dim // 2,
        PADDED_HEADS=triton.next_power_of_2(heads),
        PADDED_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=4 if heads * head_dim >= 512 else 1,
    )
