"""Draft tokens: an lm_head over the drafter's rows, the target's or the drafter's own, and its argmax."""

from __future__ import annotations

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sglang_dflash.model import DFlashDraftModel


class DraftHead:
    """Greedy proposal of a whole block.

    Each tensor-parallel rank reduces its own shard of the vocabulary; only the best (logit, token) of every row
    crosses ranks. Ties resolve to the lowest token id, as a full argmax would.
    """

    def __init__(
        self, lm_head: VocabParallelEmbedding, tp_group: GroupCoordinator, target_tokens: torch.Tensor | None = None
    ) -> None:
        """
        Args:
            lm_head: over the target's vocabulary, or over the drafter's own.
            target_tokens: [draft vocabulary] int64, ascending: the target's token for each of the drafter's; None where
                they are the same.
        """
        self._lm_head = lm_head
        self._tp_group = tp_group
        shard = lm_head.shard_indices
        if shard.num_added_elements:
            raise ValueError(f"DFLASH cannot draft with an lm_head that has {shard.num_added_elements} added tokens.")
        self._num_tokens = shard.num_org_elements
        self._first_token = shard.org_vocab_start_index
        self._target_tokens = target_tokens

    @classmethod
    def of(cls, drafter: DFlashDraftModel, target_lm_head: VocabParallelEmbedding, tp_group: GroupCoordinator):
        """The head that a drafter drafts with."""
        if drafter.dflash_config.draft_vocab_size is None:
            return cls(target_lm_head, tp_group)
        return cls(drafter.lm_head, tp_group, drafter.target_tokens)

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
        if self._target_tokens is not None:
            tokens = self._target_tokens[tokens]
        return torch.cat((block_ids[:, :1], tokens), dim=1)

    def _argmax(self, logits: torch.Tensor) -> torch.Tensor:
        if self._tp_group.world_size == 1:
            return logits.argmax(dim=-1)
        best, token = logits.max(dim=-1)
        best = self._tp_group.all_gather(best[None], dim=0)
        token = self._tp_group.all_gather(token[None] + self._first_token, dim=0)
        # Ranks hold ascending parts of the vocabulary, and argmax takes the first of equals.
        return token.gather(0, best.argmax(dim=0, keepdim=True))[0]
