"""A vocabulary of which each tensor-parallel rank has some columns, and how ranks share what they find in theirs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding


class VocabPart(NamedTuple):
    """Columns of a shard that are tokens which follow each other.

    Attributes:
        first_column: of them in the shard.
        num_columns: how many they are, at least 1.
        first_token: id of the token of the first column.
    """

    first_column: int
    num_columns: int
    first_token: int


def vocab_parts(lm_head: VocabParallelEmbedding) -> list[VocabPart]:
    """What this rank's shard has of the vocabulary: of the original one and of what was added to it. Between them is
    padding; either may be missing."""
    shard = lm_head.shard_indices
    parts = (
        VocabPart(0, shard.num_org_elements, shard.org_vocab_start_index),
        VocabPart(shard.num_org_elements_padded, shard.num_added_elements, shard.added_vocab_start_index),
    )
    return [part for part in parts if part.num_columns]


class VocabShard:
    """This rank's part of the vocabulary, among those of the other ranks.

    Attributes:
        parts: of the vocabulary that are in it; a small vocabulary does not reach the last ranks.
        has_other_ranks: whether there are shards besides.
    """

    def __init__(self, lm_head: VocabParallelEmbedding, tp_group: GroupCoordinator) -> None:
        """
        Args:
            lm_head: whose output the logits are.
            tp_group: the ranks among which it is sharded.
        """
        self.parts = vocab_parts(lm_head)
        self.has_other_ranks = tp_group.world_size > 1
        self._tp_group = tp_group

    @property
    def is_whole(self) -> bool:
        """Whether it is the vocabulary as it is: its columns are token ids."""
        return not self.has_other_ranks and len(self.parts) == 1

    @property
    def first_token(self) -> int:
        """The token id of the first column of a shard that is one part."""
        [part] = self.parts
        return part.first_token

    def split(self, logits: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
        """Of logits [rows, columns of the shard], the columns of each part, and the token id of their first."""
        return [(logits[:, first : first + num_columns], token) for first, num_columns, token in self.parts]

    def gather(self, found: torch.Tensor) -> torch.Tensor:
        """What each rank has found, [ranks, ...], the same on all of them.

        Args:
            found: [...] int64, of one shape on all ranks: `GroupCoordinator` gathers that on NCCL, in CUDA graphs too,
                and on gloo; its all-reduce only sums.
        """
        return self._tp_group.all_gather(found[None], dim=0)
