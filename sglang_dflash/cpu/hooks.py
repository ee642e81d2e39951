"""The places where SGLang expects a GPU of the machine it serves on.

Every hook does on CPU tensors what SGLang does on the GPU, so that speculative decoding, grammars and paged
KV run unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import xgrammar
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, PPProxyTensors
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.utils import get_num_new_pages
from torch import Tensor

from sglang_dflash.hooks import Hook


def _record_stream(original: Callable, tensor: Tensor, stream: object) -> None:
    if tensor.device.type != "cpu":
        original(tensor, stream)


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


def _allocate_token_bitmask(vocab_size: int, batch_size: int) -> Tensor:
    return xgrammar.allocate_token_bitmask(batch_size, vocab_size)


def _apply_vocab_mask(logits: Tensor, vocab_mask: Tensor) -> None:
    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)


def _apply_vocab_mask_method(grammar: object, logits: Tensor, vocab_mask: Tensor) -> None:
    _apply_vocab_mask(logits, vocab_mask)


def _alloc_extend(
    allocator: PagedTokenToKVPoolAllocator,
    prefix_lens: Tensor,
    prefix_lens_cpu: Tensor,
    seq_lens: Tensor,
    seq_lens_cpu: Tensor,
    last_loc: Tensor,
    extend_num_tokens: int,
    num_new_pages: int | None = None,
) -> Tensor | None:
    """`PagedTokenToKVPoolAllocator.alloc_extend` with SGLang's own torch version of its kernel.

    Args:
        allocator: whose first free pages are taken.
        prefix_lens: [bs] integer, tokens that have slots.
        prefix_lens_cpu: [bs], the same.
        seq_lens: [bs] integer, tokens that are to have slots.
        seq_lens_cpu: [bs], the same.
        last_loc: [bs] integer, slot of the last token of each prefix, -1 if the prefix is empty.
        extend_num_tokens: sum(seq_lens - prefix_lens).
        num_new_pages: pages to take, if known.

    Returns:
        [extend_num_tokens] int64 slots, or None if there are not enough free pages.
    """
    bs = len(prefix_lens)
    if allocator.need_sort and extend_num_tokens // allocator.page_size + bs + 1 > len(allocator.free_pages):
        allocator.merge_and_sort_free()
    if num_new_pages is None:
        num_new_pages = get_num_new_pages(
            seq_lens=seq_lens_cpu, page_size=allocator.page_size, prefix_lens=prefix_lens_cpu
        )
    if num_new_pages > len(allocator.free_pages):
        return None
    out_indices = torch.empty(extend_num_tokens, dtype=torch.int64)
    alloc_extend_naive(
        prefix_lens,
        seq_lens,
        last_loc,
        allocator.free_pages,
        out_indices,
        allocator.page_size,
        allocator.device,
    )
    allocator.free_pages = allocator.free_pages[num_new_pages:]
    return out_indices


def _alloc_decode(
    allocator: PagedTokenToKVPoolAllocator, seq_lens: Tensor, seq_lens_cpu: Tensor, last_loc: Tensor
) -> Tensor | None:
    """`PagedTokenToKVPoolAllocator.alloc_decode`: one more token per request.

    Args:
        allocator: whose first free pages are taken.
        seq_lens: [bs] integer, with the new token.
        seq_lens_cpu: [bs], the same.
        last_loc: [bs] integer, slot of the token before it.

    Returns:
        [bs] int64 slots, or None if there are not enough free pages.
    """
    if allocator.need_sort and len(seq_lens) > len(allocator.free_pages):
        allocator.merge_and_sort_free()
    starts_page = (seq_lens - 1) % allocator.page_size == 0
    num_new_pages = int(starts_page.sum())
    if num_new_pages > len(allocator.free_pages):
        return None
    out_indices = last_loc.to(torch.int64) + 1
    out_indices[starts_page] = allocator.free_pages[:num_new_pages] * allocator.page_size
    allocator.free_pages = allocator.free_pages[num_new_pages:]
    return out_indices


def _all_gather_into_tensor(original: Callable, group: GroupCoordinator, output: Tensor, input: Tensor) -> None:
    if input.device.type != "cpu":
        original(group, output, input)
    else:
        torch.distributed.all_gather_into_tensor(output, input, group=group.device_group)


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


_PAGED = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"
_XGRAMMAR = "sglang.srt.constrained.xgrammar_backend"

CPU_HOOKS: list[Hook] = [
    Hook(
        target="torch.Tensor.record_stream",
        kind=HookType.AROUND,
        function=_record_stream,
        why="`managers.overlap_utils.FutureMap._resolve_spec_extras` and the in-tree DFLASH worker call it "
        "on every device; PyTorch has it for accelerators only, and a CPU has no stream to wait for",
        until="SGLang calls it on CUDA tensors only, as `spec_utils.record_stream_each` does",
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
        kind=HookType.AROUND,
        function=_extend_forward_kwargs,
        why="it rounds `input_embeds` to bfloat16 whatever the model's dtype",
        until="it casts to the model's dtype",
    ),
    Hook(
        target=f"{_XGRAMMAR}._allocate_token_bitmask",
        kind=HookType.REPLACE,
        function=_allocate_token_bitmask,
        why="it pins the mask, which needs an accelerator",
        until="it asks `is_pin_memory_available`",
    ),
    Hook(
        target=f"{_XGRAMMAR}.XGrammarGrammar.apply_vocab_mask",
        kind=HookType.REPLACE,
        function=_apply_vocab_mask_method,
        why="it refuses CPU logits",
        until="it calls xgrammar's own CPU operator",
    ),
    Hook(
        target=f"{_XGRAMMAR}.XGrammarGrammarBackend.apply_vocab_mask",
        kind=HookType.REPLACE,
        function=_apply_vocab_mask,
        why="it refuses CPU logits",
        until="it calls xgrammar's own CPU operator",
    ),
    Hook(
        target=f"{_PAGED}.alloc_extend",
        kind=HookType.REPLACE,
        function=_alloc_extend,
        why="with page_size > 1 it launches a Triton kernel",
        until="it falls back to `alloc_extend_naive` on a CPU",
    ),
    Hook(
        target=f"{_PAGED}.alloc_decode",
        kind=HookType.REPLACE,
        function=_alloc_decode,
        why="with page_size > 1 it launches a Triton kernel",
        until="it has a torch version for a CPU",
    ),
    Hook(
        target="sglang.srt.distributed.parallel_state.GroupCoordinator.all_gather_into_tensor",
        kind=HookType.AROUND,
        function=_all_gather_into_tensor,
        why="its custom operator has no CPU kernel; several tensor-parallel ranks need it",
        until="it goes to torch.distributed on a CPU, as `GroupCoordinator.all_gather` does",
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
