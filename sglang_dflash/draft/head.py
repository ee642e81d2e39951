"""Draft tokens: the argmax of an lm_head, the target's or the drafter's own, over the drafter's rows."""

from __future__ import annotations

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sglang_dflash.draft.model import DFlashDraftModel
from sglang_dflash.verify.vocab_argmax import VocabArgmax


class DraftHead:
    """Greedy proposal of a whole block."""

    def __init__(
        self, lm_head: VocabParallelEmbedding, tp_group: GroupCoordinator, target_tokens: torch.Tensor | None = None
    ) -> None:
        """
        Args:
            lm_head: over the target's vocabulary, or over the drafter's own.
            tp_group: the ranks among which `lm_head` is sharded.
            target_tokens: [draft vocabulary] int64, ascending: the target's token for each of the drafter's; None where
                they are the same.
        """
        self._lm_head = lm_head
        self._argmax = VocabArgmax(lm_head, tp_group)
        self._target_tokens = target_tokens

    @classmethod
    def of(cls, drafter: DFlashDraftModel, target_lm_head: VocabParallelEmbedding, tp_group: GroupCoordinator):
        """The head that a drafter drafts with."""
        if drafter.dflash_config.draft_vocab_size is None:
            return cls(target_lm_head, tp_group)
        return cls(drafter.lm_head, tp_group, drafter.target_tokens)

    def __call__(self, block_ids: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Fill in a block.

        Args:
            block_ids: [bs, W] int64, column 0 is the bonus token.
            hidden_states: [bs * W, H], the drafter's rows.

        Returns:
            [bs, W] int64: the bonus token and W - 1 draft tokens.
        """
        bs, width = block_ids.shape
        # Row 0 predicts the bonus token, which is already known.
        rows = hidden_states.view(bs, width, -1)[:, 1:].reshape(bs * (width - 1), -1)
        tokens = self._argmax(self._lm_head.quant_method.apply(self._lm_head, rows))
        if self._target_tokens is not None:
            tokens = self._target_tokens[tokens]
        return torch.cat((block_ids[:, :1], tokens.view(bs, width - 1)), dim=1)
