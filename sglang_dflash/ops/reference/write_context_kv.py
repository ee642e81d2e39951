"""k_norm, RoPE and the KV write of the drafter's context, in torch."""

from __future__ import annotations

import torch

from sglang_dflash.ops.reference.norm_rope import norm_rope
from sglang_dflash.types import KVBuffers


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
    """Normalise and rotate the keys of every layer, and write keys and values to their slots.

    Both are rounded to `kv.dtype` and then converted to the pool's dtype without a scale. The block path does the same
    (`MHATokenToKVPool.set_kv_buffer`).

    Args:
        kv: [T, layers, 2, kv_heads, head_dim]. The drafter's k and v projections of the context, heads of this rank.
        k_norm_weight: [layers, head_dim].
        eps: float. Of the norm.
        cos_sin_cache: [max_position, head_dim]. Cosines, then sines (neox style).
        positions: [T] int64. Positions in the text.
        cache_loc: [T] int64. KV slots.
        accept_lens: [bs] int64, for T = bs * W verified tokens. Only the first accept_lens of every W tokens are
            written; None writes all.
        buffers: the drafter's KV pool.
    """
    if accept_lens is not None:
        rows = torch.arange(kv.shape[0], device=kv.device).view(accept_lens.shape[0], -1)
        committed = (rows - rows[:, :1] < accept_lens[:, None]).view(-1)
        kv, positions, cache_loc = kv[committed], positions[committed], cache_loc[committed]
    cos, sin = cos_sin_cache[positions].float()[:, None, None, :].chunk(2, dim=-1)
    keys = norm_rope(kv[:, :, 0], k_norm_weight[:, None, :], eps, cos, sin).to(buffers.dtype)
    values = kv[:, :, 1].to(buffers.dtype)
    for layer, (k_buffer, v_buffer) in enumerate(zip(buffers.k, buffers.v, strict=True)):
        k_buffer[cache_loc] = keys[:, layer].view(k_buffer.dtype)
        v_buffer[cache_loc] = values[:, layer].view(v_buffer.dtype)
