"""The places where SGLang expects a GPU of the machine it serves on.

Every hook does on CPU tensors what SGLang does on the GPU, so that speculative decoding, grammars and paged
KV run unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import xgrammar
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, PPProxyTensors
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plugins.hook_registry import HookType
from torch import Tensor

from sglang_dflash.hooks import Hook


def _extend_forward_kwargs(
    original: Callable,
    runner: ModelRunner,
    forward_batch: ForwardBatch,
    pp_proxy_tensors: PPProxyTensors | None,
) -> dict[str, Any]:
    kwargs = original(runner, forward_batch, pp_proxy_tensors)
    if forward_batch.input_embeds is not None:
        embeds = forward_batch.input_embeds.to(runner.dtype)
        if forward_batch.replace_embeds is not None and forward_batch.replace_positions is not None:
            embeds = embeds.clone()
            embeds[forward_batch.replace_positions] = forward_batch.replace_embeds.to(runner.dtype)
        kwargs["input_embeds"] = embeds
    return kwargs


def _apply_vocab_mask(logits: Tensor, vocab_mask: Tensor) -> None:
    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)


def _murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """MurmurHash3 of (seed, position, column), as the Triton kernel of the same name computes it.

    Args:
        seed: [n] uint64.
        positions: [n] integer below 2**32.
        col_indices: [m] integer below 2**32.

    Returns:
        [n, m] int64 hashes below 2**32.
    """
    low32 = 0xFFFFFFFF

    def mix(hashed: Tensor | int, key: Tensor) -> Tensor:
        # int64 products wrap around, which leaves their low 32 bits alone.
        key = key * 0xCC9E2D51 & low32
        key = (key << 15 | key >> 17) & low32
        hashed = hashed ^ (key * 0x1B873593 & low32)
        hashed = (hashed << 13 | hashed >> 19) & low32
        return hashed * 5 + 0xE6546B64 & low32

    seed = seed.view(torch.int64)[:, None]
    hashed = mix(0, seed & low32)
    for key in (seed >> 32 & low32, positions[:, None].to(torch.int64), col_indices[None].to(torch.int64)):
        hashed = mix(hashed, key)
    # 16 bytes went in.
    hashed = hashed ^ 16
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B & low32
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & low32
    return hashed ^ hashed >> 16


def _skip_batch_invariant_mode(original: Callable, runner: ModelRunner) -> None:
    if runner.device != "cpu":
        original(runner)


CPU_HOOKS: list[Hook] = [
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
        kind=HookType.AROUND,
        function=_extend_forward_kwargs,
        why="it rounds `input_embeds` to bfloat16 whatever the model's dtype",
        until="it casts to the model's dtype",
    ),
    Hook(
        target="sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend.apply_vocab_mask",
        kind=HookType.REPLACE,
        function=_apply_vocab_mask,
        why="it refuses CPU logits, which a single grammar's own method takes",
        until="it calls xgrammar's own CPU operator too",
    ),
    Hook(
        target="sglang.srt.layers.sampler.murmur_hash32",
        kind=HookType.REPLACE,
        function=_murmur_hash32,
        why="sampling by a request's seed launches a Triton kernel",
        until="it has a torch version for a CPU",
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
        kind=HookType.AROUND,
        function=_skip_batch_invariant_mode,
        why="--enable-deterministic-inference replaces matrix products by Triton kernels and finds no accelerator",
        until="it has batch-invariant operators for a CPU, or leaves PyTorch's alone there",
    ),
]
