"""q_norm, k_norm, RoPE and the KV write of one layer's block rows, in torch."""

from __future__ import annotations

import torch

from sglang_dflash.ops.reference.norm_rope import norm_rope


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
    """Normalise and rotate queries and keys, and write keys and values to their slots.

    Shapes: T tokens, Hq query heads and H KV heads of this rank, D head dimension. Everything of one dtype, but for the
    norms and the cache.

    Args:
        qkv: [T, (Hq + 2 * H) * D], a layer's projections; its columns are contiguous.
        q_norm_weight, k_norm_weight: [D].
        cos_sin_cache: [max_position, D], cosines then sines (neox style).
        positions: [T] int64, true positions.
        cache_loc: [T] int64, KV slots.
        k_buffer, v_buffer: [slots, H, D], the layer's KV.
        is_early: begin while the kernel before still runs; see
            :func:`sglang_dflash.ops.reference.add_rms_norm.add_rms_norm`.

    Returns:
        Queries [T, Hq * D], keys and values [T, H * D], contiguous: backends would copy what is not.
    """
    kv_heads, head_dim = k_buffer.shape[1:]
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    cos, sin = cos_sin_cache[positions].float()[:, None].chunk(2, dim=-1)
    q, k = (norm_rope(x, weight, eps, cos, sin) for x, weight in ((q, q_norm_weight), (k, k_norm_weight)))
    k_buffer[cache_loc], v_buffer[cache_loc] = k, v
    return q.flatten(1), k.flatten(1), v.flatten(1).contiguous()
