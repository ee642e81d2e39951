"""One rank's shard of the vocabulary, and the exchange of what ranks find in theirs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding


class VocabPart(NamedTuple):
    """Columns of a shard with consecutive tokens.

    Attributes:
        first_column: first of them in the shard.
        num_columns: number of columns, at least 1.
        first_token: token id of the first column.
    """

    first_column: int
    num_columns: int
    first_token: int


def vocab_parts(lm_head: VocabParallelEmbedding) -> list[VocabPart]:
    """Return the parts of this rank's shard: of the original vocabulary, and of added tokens.

    Padding is between them. Either part may be missing.
    """
    shard = lm_head.shard_indices
    parts = (
        VocabPart(0, shard.num_org_elements, shard.org_vocab_start_index),
        VocabPart(shard.num_org_elements_padded, shard.num_added_elements, shard.added_vocab_start_index),
    )
    return [part for part in parts if part.num_columns]


class VocabShard:
    """This rank's part of the vocabulary, among those of the other ranks.

    Attributes:
        parts: parts of the vocabulary in it. The last ranks have none of a small vocabulary.
        has_other_ranks: whether other ranks have shards.
    """

    def __init__(self, lm_head: VocabParallelEmbedding, tp_group: GroupCoordinator) -> None:
        """
        Args:
            lm_head: computes the logits.
            tp_group: ranks that share it.
        """
        self.parts = vocab_parts(lm_head)
        self.has_other_ranks = tp_group.world_size > 1
        self._tp_group = tp_group

    @property
    def is_whole(self) -> bool:
        """Return whether the shard is the whole vocabulary, so that its columns are token ids."""
        return not self.has_other_ranks and len(self.parts) == 1

    @property
    def first_token(self) -> int:
        """Return the token id of the first column of a shard that is one part."""
        [part] = self.parts
        return part.first_token

    def split(self, logits: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
        """Split logits, [T, columns of the shard], into the columns of each part and the token id of the first."""
        return [(logits[:, first : first + num_columns], token) for first, num_columns, token in self.parts]

    def gather(self, found: torch.Tensor) -> torch.Tensor:
        """Gather what each rank has found.

        `GroupCoordinator` has an all-gather for NCCL, also in CUDA graphs, and for gloo. Its all-reduce only sums.

        Args:
            found: [...] int64, of one shape on all ranks.

        Returns:
            [ranks, ...], the same on all ranks.
        """
        return self._tp_group.all_gather(found[None], dim=0)
