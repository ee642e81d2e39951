"""KV slots of the next cycle, reserved before the scheduler knows what the running one accepts."""

from __future__ import annotations

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode, page_aligned_decode_alloc_lens
from sglang.srt.utils.common import is_pin_memory_available

# KV slots that are reserved for a request beyond what a cycle may need, so that not every cycle has to reserve some.
SLOTS_AHEAD = 64


def reserve_slots(batch: ScheduleBatch) -> torch.Tensor | None:
    """Reserve slots past the tokens that the CPU knows to be committed, for two of the largest blocks or trees.

    Slots are reserved in whole pages.

    `ScheduleBatch._new_tokens_required_next_decode_spec_v2` has made sure that these slots are free.

    Returns:
        [bs] int32 on the CPU. Upper bounds of the sequence lengths in the next cycle. None without requests.
    """
    # Give back the slots of tokens that have left the target's windows.
    batch.maybe_evict_swa()
    if not batch.reqs:
        return None
    reserve = get_alloc_reserve_per_decode()
    needed = [req.kv.kv_committed_len + reserve for req in batch.reqs]
    has_slots = True
    for req, length in zip(batch.reqs, needed, strict=True):
        has_slots &= length <= req.kv.kv_allocated_len
        req.decode_batch_idx += 1
    if not has_slots:
        _allocate(batch, reserve, max(needed))
    return torch.tensor(needed, dtype=torch.int32)


def _allocate(batch: ScheduleBatch, reserve: int, longest: int) -> None:
    """Give every request `reserve` slots past its committed tokens, and `SLOTS_AHEAD` more if many slots are free.

    Args:
        longest: most tokens that a request needs slots for.
    """
    pool, tree_cache = batch.req_to_token_pool, batch.tree_cache
    page_size = batch.token_to_kv_pool_allocator.page_size

    def with_ahead(ahead: int) -> tuple[list[int], list[int], int]:
        return page_aligned_decode_alloc_lens(batch.reqs, reserve=reserve + ahead, page_size=page_size)

    # A request must stay within the whole pages of its row.
    room = pool.req_to_token.shape[1] // page_size * page_size - longest
    allocated, lens, num_tokens = with_ahead(min(SLOTS_AHEAD, room))
    # A windowed pool frees slots as its windows move on, and is too small for more.
    if tree_cache.supports_swa() or 4 * num_tokens > _num_free(batch):
        allocated, lens, num_tokens = with_ahead(0)
    lens_cpu = torch.tensor([allocated, lens], dtype=torch.int32, pin_memory=is_pin_memory_available(batch.device))
    lens_gpu = lens_cpu.to(batch.device, non_blocking=True)
    alloc_for_spec_decode(
        tree_cache,
        pool,
        reqs=batch.reqs,
        req_pool_indices=batch.req_pool_indices,
        cur_kv_lens=lens_gpu[0],
        cur_kv_lens_cpu=lens_cpu[0],
        nxt_kv_lens=lens_gpu[1],
        nxt_kv_lens_cpu=lens_cpu[1],
        num_needed_tokens=num_tokens,
        batch=batch,
    )


def _num_free(batch: ScheduleBatch) -> int:
    """Return the number of free slots, with those that the radix cache can evict."""
    return batch.token_to_kv_pool_allocator.available_size() + batch.tree_cache.evictable_size()
