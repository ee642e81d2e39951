"""The norms between a layer's parts, which add the residual, by a kernel of our own.

82 of them in a cycle of Qwen3-8B and its drafter, which read little and are waited for by everything: what counts is
how soon they begin and how few steps they take.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm, _fp8_static_input_scale
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sglang_dflash import ops
from sglang_dflash.ops import small_m_linear

logger = logging.getLogger(__name__)

# Smaller rows have too few threads to gain by, larger ones too many numbers per thread.
_MIN_SIZE, _MAX_SIZE = 2048, 8192


class AddNormForward:
    """In place of how SGLang dispatches a norm, for calls with a residual."""

    def __init__(self, norm: RMSNorm | GemmaRMSNorm, follows_few_rows: bool) -> None:
        """
        Args:
            follows_few_rows: small_m_linear.MAX_ROWS rows and less come from `linear_few_rows`.
        """
        self._norm, self._original = norm, original_forward(norm)
        self._weight_offset = 1.0 if type(norm) is GemmaRMSNorm else 0.0
        self._max_early_rows = small_m_linear.MAX_ROWS if follows_few_rows else 0

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        post_residual_addition: torch.Tensor | None = None,
        **others,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        weight = self._norm.weight.data
        if (
            residual is None
            or post_residual_addition is not None
            or others
            or torch.compiler.is_compiling()
            or x.dim() != 2
            or not x.dtype == residual.dtype == weight.dtype
            or not (x.is_contiguous() and residual.is_contiguous())
        ):
            return self._original(x, residual, post_residual_addition, **others)
        is_early = x.shape[0] <= self._max_early_rows
        ops.add_rms_norm(x, residual, weight, self._norm.variance_epsilon, self._weight_offset, is_early)
        return x, residual


def install(model: nn.Module, follows_few_rows: bool) -> None:
    """Give every norm of a loaded model that gains by it the kernel that adds the residual.

    Args:
        follows_few_rows: products of the model have the kernel for few rows.
    """
    if small_m_linear.must_sum_alike():
        return
    # On several GPUs a sum over them stands between a product and the norm behind it.
    follows_few_rows &= get_parallel().tp_size == 1
    num_norms = 0
    for norm in model.modules():
        if type(norm) in (RMSNorm, GemmaRMSNorm) and is_plain_norm(norm):
            norm._forward_method = AddNormForward(norm, follows_few_rows)
            num_norms += 1
    if num_norms:
        logger.info("%s: %d norms have a kernel that adds the residual.", type(model).__name__, num_norms)


def is_plain_norm(norm: RMSNorm | GemmaRMSNorm) -> bool:
    """Whether a norm adds and scales rows of the sizes that were measured, and does nothing else to them."""
    if original_forward(norm) != norm.forward_cuda:
        return False
    if type(norm) is RMSNorm and (
        not norm.has_weight
        or norm.variance_size_override is not None
        or norm.cast_x_before_out_mul
        or norm.fp32_residual
        or norm.override_orig_dtype is not None
        # It quantises its rows for the layer behind it.
        or _fp8_static_input_scale(norm._quant_linear) is not None
    ):
        return False
    return small_m_linear.is_measured(norm.weight) and _MIN_SIZE <= norm.weight.numel() <= _MAX_SIZE


def original_forward(norm: RMSNorm | GemmaRMSNorm) -> Callable:
    """What SGLang dispatches to, which may not have been asked yet."""
    return norm._forward_method or norm._resolve_forward_method()
