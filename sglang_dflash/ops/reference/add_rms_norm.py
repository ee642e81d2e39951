"""Residual addition and RMS norm, in torch."""

from __future__ import annotations

import torch


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float, is_early: bool
) -> None:
    """Add a layer's output to the residual, and norm the sum for the next layer, both in place.

    As FlashInfer's `fused_add_rmsnorm` rounds, which SGLang takes: what is normed is the sum before it was rounded.

    Args:
        x: [M, H] floating-point, contiguous; the normed sum afterwards.
        residual: [M, H] of the same dtype, contiguous; the sum afterwards.
        weight: [H].
        weight_offset: added to every weight: 1 of Gemma's norms, else 0.
        is_early: begin while the kernel before still runs, which is faster behind one that lets others begin
            (`linear_few_rows`) and slower behind others; the result is the same.
    """
    total = x.float() + residual.float()
    residual.copy_(total)
    scale = torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)
    x.copy_(total * scale * (weight_offset + weight.float()))
