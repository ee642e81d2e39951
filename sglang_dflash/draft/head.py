"""Draft tokens: the best of an lm_head, the target's or the drafter's own, over the drafter's rows."""

from __future__ import annotations

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sglang_dflash.draft.model import DFlashDraftModel
from sglang_dflash.draft.shortlist import Shortlist
from sglang_dflash.verify.vocab_argmax import VocabArgmax
from sglang_dflash.verify.vocab_top import VocabTop


class DraftHead:
    """Proposes for a whole block: the best token of every row, or the best k."""

    def __init__(
        self,
        lm_head: VocabParallelEmbedding,
        tp_group: GroupCoordinator,
        k: int,
        target_tokens: torch.Tensor | None = None,
        multiplier: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        """
        Args:
            lm_head: over the target's vocabulary, or over the drafter's own.
            tp_group: the ranks among which `lm_head` is sharded.
            k: candidates for every row.
            target_tokens: [draft vocabulary] int64, ascending: the target's token for each of the drafter's; None where
                they are the same.
            multiplier, softcap: what logits are multiplied by, and then capped at.
        """
        self._lm_head = lm_head
        self._argmax = VocabArgmax(lm_head, tp_group)
        self._top = VocabTop(lm_head, tp_group, k)
        # A sum of capped logits needs each of them.
        self._shortlist = Shortlist.of(lm_head, k) if k == 1 or softcap is None else None
        self._target_tokens = target_tokens
        self._multiplier, self._softcap = multiplier, softcap

    @classmethod
    def of(
        cls, drafter: DFlashDraftModel, target_lm_head: VocabParallelEmbedding, tp_group: GroupCoordinator, k: int
    ) -> DraftHead:
        """The head that a drafter drafts with."""
        config = drafter.dflash_config
        if config.draft_vocab_size is None:
            lm_head, target_tokens = target_lm_head, None
        else:
            lm_head, target_tokens = drafter.lm_head, drafter.target_tokens
        return cls(lm_head, tp_group, k, target_tokens, config.output_multiplier, config.final_logit_softcapping)

    def refresh(self) -> None:
        """Before a draft: take note of weights that have changed."""
        if self._shortlist is not None:
            self._shortlist.refresh()

    def __call__(self, block_ids: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Fill in a block.

        Args:
            block_ids: [bs, W] int64, column 0 is the bonus token.
            hidden_states: [bs * W, H], the drafter's rows.

        Returns:
            [bs, W] int64: the bonus token and W - 1 draft tokens.
        """
        bs, width = block_ids.shape
        if self._shortlist is None:
            tokens = self._argmax(self._logits(hidden_states, bs))
        else:
            logits, columns, _ = self._shortlist(_drafting_rows(hidden_states, bs))
            tokens = self._argmax.of_one_part(logits[:, 0], columns[:, 0])
        tokens = self._in_target(tokens)
        return torch.cat((block_ids[:, :1], tokens.view(bs, width - 1)), dim=1)

    def candidates(self, hidden_states: torch.Tensor, bs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The best k tokens of every row behind the first.

        Args:
            hidden_states: [bs * W, H], the drafter's rows.

        Returns:
            tokens: [bs, W - 1, k] int64, the most probable first.
            logits: [bs, W - 1, k] float32, theirs.
            log_sums: [bs, W - 1] float32; `logits - log_sums` are log probabilities.
        """
        # What changes no order, but how probable tokens are.
        hidden_states = hidden_states * self._multiplier if self._multiplier != 1.0 else hidden_states
        if self._shortlist is None:
            logits = self._logits(hidden_states, bs)
            if self._softcap is not None:
                logits = logits.div_(self._softcap).tanh_().mul_(self._softcap)
            logits, tokens, log_sums = self._top(logits)
        else:
            logits, tokens, log_sums = self._top.of_one_part(*self._shortlist(_drafting_rows(hidden_states, bs)))
        shape = (bs, -1, logits.shape[1])
        return self._in_target(tokens).view(shape), logits.view(shape), log_sums.view(bs, -1)

    def _logits(self, hidden_states: torch.Tensor, bs: int) -> torch.Tensor:
        """[bs * (W - 1), columns of the shard]."""
        return self._lm_head.quant_method.apply(self._lm_head, _drafting_rows(hidden_states, bs).flatten(0, 1))

    def _in_target(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's tokens for those of this head."""
        return tokens if self._target_tokens is None else self._target_tokens[tokens]


def _drafting_rows(hidden_states: torch.Tensor, bs: int) -> torch.Tensor:
    """[bs, W - 1, H]: all rows but the first of each block, which predicts the bonus token: that is known."""
    return hidden_states.unflatten(0, (bs, -1))[:, 1:]
