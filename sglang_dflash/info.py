"""What travels with a batch: the draft side between two cycles, and the block that the target verifies.

SGLang reads these objects in its scheduler, its overlap relay (`FutureMap`) and its attention backends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode, page_aligned_decode_alloc_lens
from sglang.srt.speculative import dflash_info
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from sglang.srt.utils.common import is_pin_memory_available

from sglang_dflash.settings import SETTINGS


class DFlashVerifyInput(dflash_info.DFlashVerifyInput):
    """One block per request, verified by the target as a causal chain.

    SGLang's graph capture builds its own base class for its dummy batches, and FlashInfer and the CPU backend dispatch
    on its type, so this one must be that class.
    """


@dataclass
class DFlashDraftInput(SpecInput):
    """What a request needs to be drafted for again: the token that its last cycle ended with.

    Attributes:
        bonus_tokens: [bs] int64, committed, without KV.
        new_seq_lens: [bs] int64, committed tokens that have KV.
        future_indices: [bs], set by the scheduler while overlap scheduling relays the two tensors above.
        reserved_seq_lens_cpu: [bs] int32 on the CPU: no sequence of the next cycle is longer than this.
    """

    bonus_tokens: torch.Tensor
    new_seq_lens: torch.Tensor
    future_indices: torch.Tensor | None = None
    reserved_seq_lens_cpu: torch.Tensor | None = None

    # EAGLE's relay payload (`RelayPayload.from_draft_input`), which DFlash does not use.
    topk_p = None
    topk_index = None
    hidden_states = None

    def __post_init__(self) -> None:
        super().__init__(spec_input_type=SpecInputType.DFLASH_DRAFT)
        self.num_tokens_per_req = 1
        self.num_tokens_for_logprob_per_req = 1

    @classmethod
    def idle(cls, device: torch.device) -> DFlashDraftInput:
        empty = torch.empty(0, dtype=torch.int64, device=device)
        return cls(bonus_tokens=empty, new_seq_lens=empty)

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        """Reserve the KV slots of the next cycle, before the scheduler knows how the running one ends.

        That takes up to two blocks past what the CPU knows to be committed, in whole pages;
        `ScheduleBatch._new_tokens_required_next_decode_spec_v2` has made sure that so many are there.
        """
        # Give back the slots of tokens that have left the target's windows.
        batch.maybe_evict_swa()
        if not batch.reqs:
            return
        reserve = get_alloc_reserve_per_decode()
        needed = [req.kv.kv_committed_len + reserve for req in batch.reqs]
        self.reserved_seq_lens_cpu = torch.tensor(needed, dtype=torch.int32)
        has_slots = True
        for req, length in zip(batch.reqs, needed, strict=True):
            has_slots &= length <= req.kv.kv_allocated_len
            req.decode_batch_idx += 1
        if not has_slots:
            _allocate(batch, reserve, max(needed))

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None) -> None:
        """Keep the requests at `new_indices`; the reservation is made anew before the next cycle."""
        self.reserved_seq_lens_cpu = None
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]
        self.new_seq_lens = self.new_seq_lens[new_indices]

    def merge_batch(self, other: DFlashDraftInput) -> None:
        """Append the requests of `other`."""
        self.reserved_seq_lens_cpu = None
        if self.future_indices is not None:
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
            return
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
        self.new_seq_lens = torch.cat([self.new_seq_lens, other.new_seq_lens])


def _allocate(batch: ScheduleBatch, reserve: int, longest: int) -> None:
    """Give every request `reserve` slots past its committed tokens, and some more where slots abound.

    Args:
        longest: the most tokens that a request needs slots for.
    """
    pool, tree_cache = batch.req_to_token_pool, batch.tree_cache
    page_size = batch.token_to_kv_pool_allocator.page_size

    def with_ahead(ahead: int) -> tuple[list[int], list[int], int]:
        return page_aligned_decode_alloc_lens(batch.reqs, reserve=reserve + ahead, page_size=page_size)

    # No request may outgrow the whole pages of its row.
    room = pool.req_to_token.shape[1] // page_size * page_size - longest
    allocated, lens, num_tokens = with_ahead(min(SETTINGS.slots_ahead, room))
    # A windowed pool gives slots back as its windows move on, and has none to lend.
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
    """Slots that nobody uses; an allocation takes those of the radix cache after the others."""
    return batch.token_to_kv_pool_allocator.available_size() + batch.tree_cache.evictable_size()
