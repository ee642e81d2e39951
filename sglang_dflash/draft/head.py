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
from sglang_dflash.vocab.argmax import VocabArgmax
from sglang_dflash.vocab.top import Top, VocabTop

# Candidates of each position, [bs, W - 1, K] int64, and the two results of `ops.fill_table` for them.
Table = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class DraftHead:
    """Drafts a whole block: the best token of every position, or the best k with their probabilities.

    Attributes:
        num_candidates: K.
    """

    def __init__(
        self,
        lm_head: VocabParallelEmbedding,
        tp_group: GroupCoordinator,
        k: int,
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
        self._argmax = VocabArgmax(lm_head, tp_group)
        self._top = VocabTop(lm_head, tp_group, k)
        # The sum of exponentials needs every capped logit. Pairs have no use for it.
        needs_all = k > 1 and softcap is not None and pairs is None
        self._shortlist = None if needs_all else Shortlist.of(lm_head, k)
        self._target_tokens = target_tokens
        self._multiplier, self._softcap = multiplier, softcap
        self._first_row = 0 if predicts_from_anchor else 1
        self._pairs, self._num_children = pairs, k if num_children is None else num_children

    @classmethod
    def of(
        cls, drafter: DFlashDraftModel, target_lm_head: VocabParallelEmbedding, tp_group: GroupCoordinator, k: int
    ) -> DraftHead:
        """Return the head of a drafter: its own if it has one, else the target's.

        Args:
            k: candidates per position. Where the drafter has its own number, candidates after the same draft.
        """
        config = drafter.dflash_config
        if config.draft_vocab_size is None:
            lm_head, target_tokens = target_lm_head, None
        else:
            lm_head, target_tokens = drafter.lm_head, drafter.target_tokens
        return cls(
            lm_head,
            tp_group,
            k if config.pairs is None else config.pairs.num_candidates,
            target_tokens,
            config.output_multiplier,
            config.final_logit_softcapping,
            config.predicts_from_anchor,
            drafter.pairs,
            num_children=k,
        )

    def refresh(self) -> None:
        """Update copies of weights that have changed. Call it before a cycle."""
        if self._shortlist is not None:
            self._shortlist.refresh()

    def draft_chains(self, hidden_states: torch.Tensor, block: Block) -> torch.Tensor:
        """Draft a chain for each request.

        Args:
            hidden_states: as in :meth:`__call__`.
            block: the same requests, as the drafter has seen them.

        Returns:
            [bs, W] int64, the memory of the block. The bonus token and W - 1 draft tokens.
        """
        block_tokens = block.input_ids.view(block.seq_lens.shape[0], -1)
        if self._pairs is None:
            return block_tokens.copy_(self(block_tokens, hidden_states))
        candidates, _, ranks = self.table(hidden_states, block, None)
        ops.follow_table(candidates, ranks, block_tokens)
        return block_tokens

    def table(
        self,
        hidden_states: torch.Tensor,
        block: Block,
        bigram_tables: torch.Tensor | None,
        texts: torch.Tensor | None = None,
    ) -> Table:
        """Return how probable each candidate is after each candidate of the position before.

        Args:
            hidden_states: as in :meth:`__call__`.
            block: the same requests, with their parameters and keys.
            bigram_tables: see `ops.fill_table`. None: texts do not count.
            texts: see `ops.place_copies`. None: nothing is copied from them.
        """
        bs = block.seq_lens.shape[0]
        of_requests = (block.parameters, block.keys, bigram_tables, block.is_chain, block.seq_lens)
        if self._pairs is None:
            candidates, logits, log_sums = self.candidates(hidden_states, bs)
            copies = Copies.place(texts, block, candidates, logits)
            table = ops.fill_table(candidates, logits, log_sums, *of_requests, block.req_pool_indices)
            return candidates, *copies.weigh(*table)
        rows, bonus_tokens = self._drafting_rows(hidden_states, bs), block.input_ids.view(bs, -1)[:, 0]
        logits, tokens, _ = self._best(hidden_states, bs)
        candidates = tokens.view(bs, rows.shape[1], -1)
        # Neither changes which tokens are the best.
        logits = logits.view(candidates.shape) * self._multiplier
        if self._softcap is not None:
            logits = logits.div_(self._softcap).tanh_().mul_(self._softcap)
        copies = Copies.place(texts, block, candidates, logits)
        vectors = self._pairs(rows, bonus_tokens, candidates)
        table = ops.fill_pair_table(
            bonus_tokens, candidates, logits, vectors, self._num_children, *of_requests, block.req_pool_indices
        )
        return candidates, *copies.weigh(*table)

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
        logits, tokens, log_sums = self._best(hidden_states, bs, self._softcap)
        shape = (bs, -1, logits.shape[1])
        return self._in_target(tokens).view(shape), logits.view(shape), log_sums.view(bs, -1)

    def _best(self, hidden_states: torch.Tensor, bs: int, softcap: float | None = None) -> Top:
        """Return the best k tokens of all positions after the bonus token, with their capped logits."""
        if self._shortlist is not None:
            return self._top.of_one_part(*self._shortlist(self._drafting_rows(hidden_states, bs)))
        logits = self._logits(hidden_states, bs)
        if softcap is not None:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        return self._top(logits)

    def _logits(self, hidden_states: torch.Tensor, bs: int) -> torch.Tensor:
        """Return the logits of the draft tokens, [bs * (W - 1), columns of the shard]."""
        return self._lm_head.quant_method.apply(self._lm_head, self._drafting_rows(hidden_states, bs).flatten(0, 1))

    def _in_target(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens of this head to the target's."""
        return tokens if self._target_tokens is None else self._target_tokens[tokens]

    def _drafting_rows(self, hidden_states: torch.Tensor, bs: int) -> torch.Tensor:
        """Return the hidden states of blocks that predict drafts, [bs, W - 1, H]."""
        return hidden_states.unflatten(0, (bs, -1))[:, self._first_row :]
