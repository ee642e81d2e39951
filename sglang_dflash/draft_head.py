"""Draft tokens: the target's lm_head over the drafter's rows, and its argmax."""

from __future__ import annotations

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding


class DraftHead:
    """Greedy proposal of a whole block.

    Each tensor-parallel rank reduces its own shard of the vocabulary; only the best (logit, token) of every row
    crosses ranks. Ties resolve to the lowest token id, as a full argmax would.
    """

    def __init__(self, lm_head: VocabParallelEmbedding, tp_group: GroupCoordinator) -> None:
        self._lm_head = lm_head
        self._tp_group = tp_group
        shard = lm_head.shard_indices
        if shard.num_added_elements:
            raise ValueError(f"DFLASH cannot draft with an lm_head that has {shard.num_added_elements} added tokens.")
        self._num_tokens = shard.num_org_elements
        self._first_token = shard.org_vocab_start_index

    def __call__(self, block_ids: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Fill in the block.

        Args:
            block_ids: [bs, B] int64, column 0 is the bonus token.
            hidden_states: [bs * B, H], the drafter's rows.

        Returns:
            [bs, B] int64: the bonus token and B - 1 draft tokens.
        """
        bs, block_size = block_ids.shape
        # Row 0 predicts the bonus token, which is already known.
        rows = hidden_states.view(bs, block_size, -1)[:, 1:].reshape(bs * (block_size - 1), -1)
        logits = self._lm_head.quant_method.apply(self._lm_head, rows)[:, : self._num_tokens]
        tokens = self._argmax(logits).view(bs, block_size - 1)
        return torch.cat((block_ids[:, :1], tokens), dim=1)

    def _argmax(self, logits: torch.Tensor) -> torch.Tensor:
        if self._tp_group.world_size == 1:
            return logits.argmax(dim=-1)
        best, token = logits.max(dim=-1)
        best = self._tp_group.all_gather(best[None], dim=0)
        token = self._tp_group.all_gather(token[None] + self._first_token, dim=0)
        # Ranks hold ascending parts of the vocabulary, and argmax takes the first of equals.
        return token.gather(0, best.argmax(dim=0, keepdim=True))[0]
