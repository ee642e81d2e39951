"""q_norm, k_norm, RoPE and the KV write of one layer's block rows, in torch."""

from __future__ import annotations

import torch


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise and rotate queries and keys, and write keys and values to their slots.

    Shapes: T tokens, Hq query heads and H KV heads of this rank, D head dimension. Everything of one dtype, but for the
    norms and the cache. Rounds where SGLang's `fused_inplace_qknorm` and `apply_rope_with_cos_sin_cache_inplace` do:
    behind the norm and behind the rotation.

    Args:
        qkv: [T, (Hq + 2 * H) * D], a layer's projections; its columns are contiguous.
        q_norm_weight, k_norm_weight: [D].
        cos_sin_cache: [max_position, D], cosines then sines (neox style).
        positions: [T] int64, true positions.
        cache_loc: [T] int64, KV slots.
        k_buffer, v_buffer: [slots, H, D], the layer's KV.

    Returns:
        Queries [T, Hq * D], keys and values [T, H * D], contiguous: backends would copy what is not.
    """
    kv_heads, head_dim = k_buffer.shape[1:]
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    cos, sin = cos_sin_cache[positions].float()[:, None].chunk(2, dim=-1)

    def norm_rope(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * weight.float()
        low, high = normed.to(qkv.dtype).float().chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(qkv.dtype)

    q, k = norm_rope(q, q_norm_weight), norm_rope(k, k_norm_weight)
    k_buffer[cache_loc], v_buffer[cache_loc] = k, v
    return q.flatten(1), k.flatten(1), v.flatten(1).contiguous()
