"""Window of the drafter's context (`--speculative-draft-window-size`).

The attention backends do not know of the window. They get rows of KV slots, and lengths, in which the context begins
where the window does. So what they plan and read per cycle does not grow with the context: FA3 fills its page table,
and FlashInfer and Triton their lists of KV indices, up to those lengths. Positions stay true.
"""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.utils.common import ceil_align

from sglang_dflash import ops


class DraftWindow:
    """Short rows of `req_to_token` for the drafter, filled before every block.

    A token of a block sees the block (in causal layers, the part before it) and the context from
    `max(0, seq_len - window)` on, rounded down to a page of KV. So the window counts context tokens only, and does not
    slide within a block. SGLang's in-tree worker gives the flag the same meaning. Sliding layers of the checkpoint see
    no more than their own window.

    Attributes:
        pool: the drafter's `ReqToTokenPool`. A request has the same row in it as in the target's.
    """

    def __init__(self, window: int, page_size: int, block_size: int, target_pool: ReqToTokenPool) -> None:
        """
        Args:
            window: context tokens to keep.
            target_pool: maps every position of every request to its slot.
        """
        self._window, self._page_size, self._block_size = window, page_size, block_size
        self._target_pool = target_pool
        self._max_context = window + page_size - 1
        # Backends that plan with upper bounds add a second block to the length.
        width = ceil_align(self._max_context + 2 * block_size, page_size)
        self.pool = ReqToTokenPool(target_pool.size, width, target_pool.device, enable_memory_saver=False)

    def fill(self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        """Fill the rows of a batch. Its blocks must have slots.

        Args:
            req_pool_indices: [bs] int64.
            seq_lens: [bs] int64. Committed tokens with KV.

        Returns:
            [bs] int64. Lengths of the context that the drafter's attention sees.
        """
        return ops.gather_window(
            self._target_pool.req_to_token,
            req_pool_indices,
            seq_lens,
            self._window,
            self._page_size,
            self._block_size,
            self.pool.req_to_token,
        )

    def host_kv_lens(self, kv_lens: torch.Tensor) -> torch.Tensor:
        """Upper bounds for planning, [bs] on the CPU, from those of the whole KV, the block included."""
        return kv_lens.clamp(max=self._max_context + self._block_size)
