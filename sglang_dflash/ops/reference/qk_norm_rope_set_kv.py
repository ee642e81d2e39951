"""q_norm, k_norm, RoPE and the KV write of one layer for a block's tokens, in torch."""

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

    `q_heads` and `kv_heads` are the heads of this rank. All tensors have one dtype, except the norm weights and
    `cos_sin_cache`.

    Args:
        qkv: [T, (q_heads + 2 * kv_heads) * head_dim]. A layer's projections; rows may be strided, columns not.
        q_norm_weight, k_norm_weight: [head_dim].
        eps: float. Of both norms.
        cos_sin_cache: [max_position, head_dim]. Cosines, then sines (neox style).
        positions: [T] int64. Positions in the text.
        cache_loc: [T] int64. KV slots.
        k_buffer, v_buffer: [KV slots, kv_heads, head_dim]. The layer's KV.
        is_early: start while the kernel before still runs; see
            :func:`sglang_dflash.ops.reference.add_rms_norm.add_rms_norm`.

    Returns:
        Queries [T, q_heads * head_dim], keys and values [T, kv_heads * head_dim]. They are contiguous, because
        backends would copy strided ones.
    """
    kv_heads, head_dim = k_buffer.shape[1:]
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    cos, sin = cos_sin_cache[positions].float()[:, None].chunk(2, dim=-1)
    q, k = (norm_rope(x, weight, eps, cos, sin) for x, weight in ((q, q_norm_weight), (k, k_norm_weight)))
    k_buffer[cache_loc], v_buffer[cache_loc] = k, v
    return q.flatten(1), k.flatten(1), v.flatten(1).contiguous()
