"""SGLang's `spec_info` of a batch: the state between two cycles, and the drafts that the target verifies.

SGLang reads these objects in its scheduler, its overlap relay (`FutureMap`) and its attention backends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

from sglang_dflash.memory.reservation import reserve_slots


@dataclass
class DFlashDraftInput(SpecInput):
    """State of the requests between two cycles.

    Attributes:
        bonus_tokens: [bs] int64. The last committed token, which has no KV yet.
        new_seq_lens: [bs] int64. Committed tokens that have KV.
        future_indices: [bs]. Set by the scheduler while overlap scheduling relays the two tensors above.
        reserved_seq_lens_cpu: [bs] int32 on the CPU. Upper bounds of the next cycle's sequence lengths.
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
        """Reserve KV slots. The scheduler is about to launch a cycle of the batch."""
        self.reserved_seq_lens_cpu = reserve_slots(batch)

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None) -> None:
        """Keep the requests at `new_indices`. The next cycle makes a new reservation."""
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


def host_kv_lens(batch: ScheduleBatch, num_tokens: int) -> torch.Tensor:
    """Return KV lengths for planning on the host, with the N = `num_tokens` verified tokens of each request.

    They are exact where a backend asked the scheduler for sequence lengths (`needs_cpu_seq_lens`). Elsewhere they are
    upper bounds, known without waiting for the GPU.

    Returns:
        [bs] on the CPU.
    """
    if batch.seq_lens_cpu is not None:
        return batch.seq_lens_cpu + num_tokens
    return batch.spec_info.reserved_seq_lens_cpu
