"""Residual addition and RMS norm, in torch."""

from __future__ import annotations

import torch


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float, is_early: bool
) -> None:
    """Add a layer's output to the residual and normalise the sum for the next layer, both in place.

    The sum is normalised before it is rounded, as in FlashInfer's `fused_add_rmsnorm`, which SGLang calls.

    Args:
        x: [T, H] floating-point, contiguous. A layer's output; overwritten by the normalised sum.
        residual: [T, H] of the same dtype, contiguous. Overwritten by the sum.
        weight: [H].
        eps: float. Added to the mean square.
        weight_offset: float. Added to every weight: 1 for Gemma's norms, else 0.
        is_early: start while the kernel before still runs. The result is the same. It is faster after a kernel that
            triggers its dependents early (`linear_few_rows`), and slower after others.
    """
    total = x.float() + residual.float()
    residual.copy_(total)
    scale = torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)
    x.copy_(total * scale * (weight_offset + weight.float()))
