"""Draft tokens: the best tokens of an lm_head, the target's or the drafter's own, for the drafter's hidden states.

A drafter's rows give every position a few candidates. A table says how probable each is after each candidate of the
position before. A chain follows the table, and a tree grows from it.

Shapes as in :mod:`sglang_dflash.types`: bs requests, W draft length, K candidates, H hidden size.
"""

from __future__ import annotations

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sglang_dflash import ops
from sglang_dflash.draft.model import DFlashDraftModel
from sglang_dflash.draft.pairs import CandidateSelector, MarkovHead
from sglang_dflash.draft.shortlist import Shortlist
from sglang_dflash.draft.texts import Copies
from sglang_dflash.types import Block
from sglang_dflash.vocab.top import Top, VocabTop

# Candidates of each position, [bs, W - 1, K] int64, and the two results of `ops.fill_table` for them.
Table = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class DraftHead:
    """Finds the best k tokens of every position of a block, and how probable each is after each of the position before.

    Attributes:
        num_candidates: K.
    """

    def __init__(
        self,
        lm_head: VocabParallelEmbedding,
        tp_group: GroupCoordinator,
        k: int,
        for_trees: bool = False,
        target_tokens: torch.Tensor | None = None,
        multiplier: float = 1.0,
        softcap: float | None = None,
        predicts_from_anchor: bool = False,
        pairs: CandidateSelector | MarkovHead | None = None,
        num_children: int | None = None,
    ) -> None:
        """
        Args:
            lm_head: over the target's vocabulary, or over the drafter's own.
            tp_group: ranks that share `lm_head`.
            k: candidates per position.
            for_trees: probabilities of different positions are multiplied. A chain needs only the order of candidates.
            target_tokens: [draft vocabulary] int64, ascending. The target's token for each of the drafter's. None: they
                are the same.
            multiplier: factor of the logits.
            softcap: soft cap of the logits after that. None: there is none.
            predicts_from_anchor: the first row of a block predicts the first draft. Otherwise it predicts nothing.
            pairs: scores of pairs of drafts. None: positions are predicted independently.
            num_children: candidates that a tree may take after the same draft. None: all.
        """
        self.num_candidates = k
        self._lm_head = lm_head
        self._top = VocabTop(lm_head, tp_group, k)
        # Pairs are normalised over the candidates.
        self._has_sums = for_trees and pairs is None
        # The sum of exponentials needs every capped logit.
        self._shortlist = None if self._has_sums and softcap is not None else Shortlist.of(lm_head, k)
        self._target_tokens = target_tokens
        self._multiplier, self._softcap = multiplier, softcap
        self._first_row = 0 if predicts_from_anchor else 1
        self._pairs, self._num_children = pairs, k if num_children is None else num_children

    @classmethod
    def of(
        cls,
        drafter: DFlashDraftModel,
        target_lm_head: VocabParallelEmbedding,
        tp_group: GroupCoordinator,
        k: int,
        for_trees: bool,
    ) -> DraftHead:
        """Return the head of a drafter: its own if it has one, else the target's.

        Args:
            k: candidates per position. Where the drafter has its own number, candidates after the same draft.
            for_trees: see the class.
        """
        config = drafter.dflash_config
        if config.draft_vocab_size is None:
            lm_head, target_tokens = target_lm_head, None
        else:
            lm_head, target_tokens = drafter.lm_head, drafter.target_tokens
        return cls(
            lm_head,
            tp_group,
            config.num_candidates(k),
            for_trees,
            target_tokens,
            config.output_multiplier,
            config.final_logit_softcapping,
            config.predicts_from_anchor,
            drafter.pairs,
            num_children=k,
        )

    def draft_chains_only(self) -> None:
        """Leave out what only trees need."""
        self._has_sums = False

    def table(
        self,
        hidden_states: torch.Tensor,
        block: Block,
        bigram_tables: torch.Tensor,
        texts: torch.Tensor | None = None,
    ) -> Table:
        """Return how probable each candidate is after each candidate of the position before.

        Args:
            hidden_states: as in :meth:`candidates`.
            block: the same requests, with their parameters and keys.
            bigram_tables: see `ops.fill_table`.
            texts: see `ops.place_copies`. None: nothing is copied from them.
        """
        bs = block.seq_lens.shape[0]
        candidates, logits, log_sums = self.candidates(hidden_states, bs)
        copies = Copies.place(texts, block, candidates, logits)
        of_requests = (block.parameters, block.keys, bigram_tables, block.is_chain, block.seq_lens)
        of_requests += (block.req_pool_indices, copies.places, copies.lens)
        if self._pairs is None:
            return candidates, *ops.fill_table(candidates, logits, log_sums, *of_requests)
        bonus_tokens = block.input_ids.view(bs, -1)[:, 0]
        vectors = self._pairs(self._drafting_rows(hidden_states, bs), bonus_tokens, candidates)
        table = ops.fill_pair_table(bonus_tokens, candidates, logits, vectors, self._num_children, *of_requests)
        return candidates, *table

    def candidates(
        self, hidden_states: torch.Tensor, bs: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the best k tokens of every position after the bonus token.

        Args:
            hidden_states: [bs * W, H], or [bs * (W - 1), H] where the first row predicts. Of the drafter.

        Returns:
            tokens: [bs, W - 1, k] int64, the most probable first.
            logits: [bs, W - 1, k] float32. Of the tokens.
            log_sums: [bs, W - 1] float32. `logits - log_sums` are log probabilities. None for chains, and with pairs.
        """
        rows = self._drafting_rows(hidden_states, bs)
        if self._has_sums:
            # The sum of exponentials is that of multiplied and capped logits.
            logits, tokens, log_sums = self._best(self._multiply(rows), self._softcap)
            log_sums = log_sums.view(rows.shape[:2])
        else:
            # Neither changes which tokens are the best.
            logits, tokens, _ = self._best(rows)
            logits, log_sums = _cap(self._multiply(logits), self._softcap), None
        shape = (*rows.shape[:2], self.num_candidates)
        return self._in_target(tokens).view(shape), logits.view(shape), log_sums

    def _best(self, rows: torch.Tensor, softcap: float | None = None) -> Top:
        """Return the best k tokens for rows [bs, W - 1, H], with their capped logits."""
        if self._shortlist is not None:
            return self._top.of_one_part(*self._shortlist(rows, self._has_sums))
        return self._top(_cap(self._lm_head.quant_method.apply(self._lm_head, rows.flatten(0, 1)), softcap))

    def _multiply(self, values: torch.Tensor) -> torch.Tensor:
        return values if self._multiplier == 1.0 else values * self._multiplier

    def _in_target(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens of this head to the target's."""
        return tokens if self._target_tokens is None else self._target_tokens[tokens]

    def _drafting_rows(self, hidden_states: torch.Tensor, bs: int) -> torch.Tensor:
        """Return the hidden states of blocks that predict drafts, [bs, W - 1, H]."""
        return hidden_states.unflatten(0, (bs, -1))[:, self._first_row :]


def _cap(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Cap logits in place."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)
