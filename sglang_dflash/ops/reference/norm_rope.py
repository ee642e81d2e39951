"""RMSNorm and RoPE of attention heads, in torch."""

from __future__ import annotations

import torch


def norm_rope(x: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Normalise and rotate heads (neox style). Round to their dtype after the norm and again after the rotation.

    The steps are those of SGLang's `fused_inplace_qknorm` and `apply_rope_with_cos_sin_cache_inplace`. Keys of the
    block and keys of the context take the same steps.

    Args:
        x: [..., head_dim].
        weight: broadcasts to `x`.
        eps: float. Added to the mean square.
        cos, sin: float32. Broadcast to [..., head_dim / 2].

    Returns:
        Shape and dtype of `x`.
    """
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * weight.float()
    low, high = normed.to(x.dtype).float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
