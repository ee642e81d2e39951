"""Draft tokens: the best tokens of an lm_head, the target's or the drafter's own, for the drafter's hidden states."""

from __future__ import annotations

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sglang_dflash.draft.model import DFlashDraftModel
from sglang_dflash.draft.shortlist import Shortlist
from sglang_dflash.vocab.argmax import VocabArgmax
from sglang_dflash.vocab.top import VocabTop


class DraftHead:
    """Drafts a whole block: the best token of every position, or the best k."""

    def __init__(
        self,
        lm_head: VocabParallelEmbedding,
        tp_group: GroupCoordinator,
        k: int,
        target_tokens: torch.Tensor | None = None,
        multiplier: float = 1.0,
        softcap: float | None = None,
        predicts_from_anchor: bool = False,
    ) -> None:
        """
        Args:
            lm_head: over the target's vocabulary, or over the drafter's own.
            tp_group: ranks that share `lm_head`.
            k: candidates per position.
            target_tokens: [draft vocabulary] int64, ascending. The target's token for each of the drafter's. None: they
                are the same.
            multiplier: factor of the logits.
            softcap: soft cap of the logits after that. None: there is none.
            predicts_from_anchor: the first row of a block predicts the first draft. Otherwise it predicts nothing.
        """
        self._lm_head = lm_head
        self._argmax = VocabArgmax(lm_head, tp_group)
        self._top = VocabTop(lm_head, tp_group, k)
        # The sum of exponentials needs every capped logit.
        self._shortlist = Shortlist.of(lm_head, k) if k == 1 or softcap is None else None
        self._target_tokens = target_tokens
        self._multiplier, self._softcap = multiplier, softcap
        self._first_row = 0 if predicts_from_anchor else 1

    @classmethod
    def of(
        cls, drafter: DFlashDraftModel, target_lm_head: VocabParallelEmbedding, tp_group: GroupCoordinator, k: int
    ) -> DraftHead:
        """Return the head of a drafter: its own if it has one, else the target's."""
        config = drafter.dflash_config
        if config.draft_vocab_size is None:
            lm_head, target_tokens = target_lm_head, None
        else:
            lm_head, target_tokens = drafter.lm_head, drafter.target_tokens
        return cls(
            lm_head,
            tp_group,
            k,
            target_tokens,
            config.output_multiplier,
            config.final_logit_softcapping,
            config.predicts_from_anchor,
        )

    def refresh(self) -> None:
        """Update copies of weights that have changed. Call it before a cycle."""
        if self._shortlist is not None:
            self._shortlist.refresh()

    def __call__(self, block_ids: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Draft the tokens of blocks.

        Args:
            block_ids: [bs, W] int64. Column 0 has the bonus tokens.
            hidden_states: [bs * W, H], or [bs * (W - 1), H] where the first row predicts. Of the drafter.

        Returns:
            [bs, W] int64. The bonus token and W - 1 draft tokens.
        """
        bs, width = block_ids.shape
        if self._shortlist is None:
            tokens = self._argmax(self._logits(hidden_states, bs))
        else:
            logits, columns, _ = self._shortlist(self._drafting_rows(hidden_states, bs))
            tokens = self._argmax.of_one_part(logits[:, 0], columns[:, 0])
        tokens = self._in_target(tokens)
        return torch.cat((block_ids[:, :1], tokens.view(bs, width - 1)), dim=1)

    def candidates(self, hidden_states: torch.Tensor, bs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the best k tokens of every position after the bonus token.

        Args:
            hidden_states: as in :meth:`__call__`.

        Returns:
            tokens: [bs, W - 1, k] int64, the most probable first.
            logits: [bs, W - 1, k] float32. Of the tokens.
            log_sums: [bs, W - 1] float32. `logits - log_sums` are log probabilities.
        """
        # A factor changes the probabilities, not the order.
        hidden_states = hidden_states * self._multiplier if self._multiplier != 1.0 else hidden_states
        if self._shortlist is None:
            logits = self._logits(hidden_states, bs)
            if self._softcap is not None:
                logits = logits.div_(self._softcap).tanh_().mul_(self._softcap)
            logits, tokens, log_sums = self._top(logits)
        else:
            logits, tokens, log_sums = self._top.of_one_part(*self._shortlist(self._drafting_rows(hidden_states, bs)))
        shape = (bs, -1, logits.shape[1])
        return self._in_target(tokens).view(shape), logits.view(shape), log_sums.view(bs, -1)

    def _logits(self, hidden_states: torch.Tensor, bs: int) -> torch.Tensor:
        """Return the logits of the draft tokens, [bs * (W - 1), columns of the shard]."""
        return self._lm_head.quant_method.apply(self._lm_head, self._drafting_rows(hidden_states, bs).flatten(0, 1))

    def _in_target(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens of this head to the target's."""
        return tokens if self._target_tokens is None else self._target_tokens[tokens]

    def _drafting_rows(self, hidden_states: torch.Tensor, bs: int) -> torch.Tensor:
        """Return the hidden states of blocks that predict drafts, [bs, W - 1, H]."""
        return hidden_states.unflatten(0, (bs, -1))[:, self._first_row :]
