"""A head's RMSNorm and rotation, in torch."""

from __future__ import annotations

import torch


def norm_rope(x: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Normalise and rotate heads (neox style), rounding to their dtype behind the norm and behind the rotation.

    These are the steps of SGLang's `fused_inplace_qknorm` and `apply_rope_with_cos_sin_cache_inplace`. The keys of a
    block and those of the context take the same ones.

    Args:
        x: [..., D].
        weight: what broadcasts to `x`.
        cos, sin: float32, what broadcasts to [..., D / 2].

    Returns:
        As `x`.
    """
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * weight.float()
    low, high = normed.to(x.dtype).float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
