"""Kernel for the norms that add the residual, in place of FlashInfer's.

A cycle of Qwen3-8B and its drafter runs 82 of them, and every other kernel waits for them. They read little, so their
latency counts: how early they start and how few steps they take. Prefills keep FlashInfer's: without CUDA graphs the
host launches each norm of a prefill, and a Triton kernel takes it longer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm, _fp8_static_input_scale
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sglang_dflash import ops
from sglang_dflash.ops import small_m_linear

logger = logging.getLogger(__name__)

# Smaller rows have too few threads to gain; larger ones have too many numbers per thread.
_MIN_SIZE, _MAX_SIZE = 2048, 8192


_is_in_cycle = False


@contextmanager
def in_cycle() -> Iterator[None]:
    """Have norms use the kernel: the forwards of a decode cycle run inside."""
    global _is_in_cycle
    before, _is_in_cycle = _is_in_cycle, True
    try:
        yield
    finally:
        _is_in_cycle = before


class AddNormForward:
    """Forward method of a norm. Calls with a residual in a cycle take `ops.add_rms_norm`, others SGLang's method."""

    def __init__(self, norm: RMSNorm | GemmaRMSNorm, follows_few_rows: bool) -> None:
        """
        Args:
            follows_few_rows: inputs of up to `small_m_linear.MAX_ROWS` rows come from `linear_few_rows`.
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
            not _is_in_cycle
            or residual is None
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
    """Install the kernel that adds the residual in every norm of a loaded model that gains by it.

    Args:
        model: a model on SGLang's layers.
        follows_few_rows: linear layers of the model use the kernel for few rows.
    """
    if small_m_linear.must_be_batch_invariant():
        return
    # With tensor parallelism an all-reduce runs between a linear layer and the norm after it.
    follows_few_rows &= get_parallel().tp_size == 1
    num_norms = 0
    for norm in model.modules():
        if type(norm) in (RMSNorm, GemmaRMSNorm) and is_plain_norm(norm):
            norm._forward_method = AddNormForward(norm, follows_few_rows)
            num_norms += 1
    if num_norms:
        logger.info("%s: %d norms use the kernel that adds the residual.", type(model).__name__, num_norms)


def is_plain_norm(norm: RMSNorm | GemmaRMSNorm) -> bool:
    """Return whether a norm only adds and normalises, for a hidden size that was measured."""
    if original_forward(norm) != norm.forward_cuda:
        return False
    if type(norm) is RMSNorm and (
        not norm.has_weight
        or norm.variance_size_override is not None
        or norm.cast_x_before_out_mul
        or norm.fp32_residual
        or norm.override_orig_dtype is not None
        # Such a norm quantises its output for the next layer.
        or _fp8_static_input_scale(norm._quant_linear) is not None
    ):
        return False
    return small_m_linear.is_measured(norm.weight) and _MIN_SIZE <= norm.weight.numel() <= _MAX_SIZE


def original_forward(norm: RMSNorm | GemmaRMSNorm) -> Callable:
    """Return the method that SGLang dispatches to; resolve it if SGLang has not done so yet."""
    return norm._forward_method or norm._resolve_forward_method()
