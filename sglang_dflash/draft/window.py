"""`--speculative-draft-window-size`: the drafter sees the last tokens of the context only.

The attention backends are not told of a window. They are given rows of KV slots, and lengths, in which the context
begins where the window does, so what they plan and read per cycle does not grow with the context: FA3 fills its page
table, and FlashInfer and Triton their lists of KV indices, up to those lengths. Positions stay true.
"""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.utils.common import ceil_align

from sglang_dflash import ops


class DraftWindow:
    """The drafter's own, short rows of `req_to_token`, filled anew before every block.

    Every row of a block sees the whole block (or, in causal layers, the rows before it) and of the context the tokens
    from `max(0, seq_len - window)` on, rounded down to a page of KV; sliding layers of the checkpoint see no more than
    their own window besides. So the window counts context tokens, block rows come on top, and it does not slide within
    a block. This is the flag's meaning in SGLang's in-tree worker too.

    Attributes:
        pool: in place of the target's `ReqToTokenPool` for the drafter; its rows have the same numbers.
    """

    def __init__(self, window: int, page_size: int, block_size: int, target_pool: ReqToTokenPool) -> None:
        """
        Args:
            window: context tokens to keep.
            target_pool: which maps every position of every request to its slot.
        """
        self._window, self._page_size, self._block_size = window, page_size, block_size
        self._target_pool = target_pool
        self._max_context = window + page_size - 1
        # Backends that plan with upper bounds add a block to a length that has one already.
        width = ceil_align(self._max_context + 2 * block_size, page_size)
        self.pool = ReqToTokenPool(target_pool.size, width, target_pool.device, enable_memory_saver=False)

    def fill(self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        """Fill the rows of a batch whose blocks have their slots.

        Args:
            req_pool_indices: [bs] int64.
            seq_lens: [bs] int64, committed tokens that have KV.

        Returns:
            [bs] int64, the lengths of the context as the drafter's attention is to see it.
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
