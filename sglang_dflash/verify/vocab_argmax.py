"""The argmax over a vocabulary of which each tensor-parallel rank has a part of the columns."""

from __future__ import annotations

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sglang_dflash import ops

# Integers of a float's width: its bits, read as one, order like the float where it is not negative.
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_TOKEN_BITS = 32
_TOKEN_MASK = 2**_TOKEN_BITS - 1


def vocab_parts(lm_head: VocabParallelEmbedding) -> list[tuple[int, int, int]]:
    """What this rank's shard has of the vocabulary: first column, columns, and token id of the first column, of a part
    of the original vocabulary and one of the vocabulary that was added to it. Between them is padding; a part may be
    missing."""
    shard = lm_head.shard_indices
    parts = (
        (0, shard.num_org_elements, shard.org_vocab_start_index),
        (shard.num_org_elements_padded, shard.num_added_elements, shard.added_vocab_start_index),
    )
    return [part for part in parts if part[1]]


class VocabArgmax:
    """Each rank reduces its own shard of the vocabulary, and ranks exchange one int64 per row: the best logit above,
    the token below (`pack`), so that the largest one is the answer. It is one all-gather and a maximum, because that is
    what `GroupCoordinator` has for int64 on NCCL, inside CUDA graphs too, and on gloo; its all-reduce only sums.

    All ranks hold the same keys afterwards, and so the same tokens, whatever each of them computed: a rank whose logits
    are off by a rounding error changes what is chosen, never on one rank only. Ties resolve to the lowest token id on
    any number of ranks, as in an argmax over the full vocabulary, so tp 1 and tp 2 choose the same from equal logits.
    """

    def __init__(self, lm_head: VocabParallelEmbedding, tp_group: GroupCoordinator) -> None:
        """
        Args:
            lm_head: whose output the logits are.
            tp_group: the ranks among which it is sharded.
        """
        self._tp_group = tp_group
        self._parts = vocab_parts(lm_head)
        self._is_whole = tp_group.world_size == 1 and len(self._parts) == 1

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Token with the largest logit among all ranks, the lowest id of equals.

        Args:
            logits: [rows, columns of the shard] float32, bfloat16 or float16, without NaN.

        Returns:
            [rows] int64, the same on every rank.
        """
        if self._is_whole:
            first_column, columns, _ = self._parts[0]
            return ops.row_max(logits[:, first_column : first_column + columns])[1]
        keys = [
            pack(*ops.row_max(logits[:, first_column : first_column + columns]), first_token)
            for first_column, columns, first_token in self._parts
        ]
        if not keys:
            # A small vocabulary does not reach the last ranks.
            keys = [torch.full((logits.shape[0],), torch.iinfo(torch.int64).min, device=logits.device)]
        return self._exchange(torch.stack(keys).amax(dim=0))

    def of_one_part(self, maxima: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """The same, where this rank's shard is one part of the vocabulary, of its best logits and their columns."""
        [(_, _, first_token)] = self._parts
        return columns if self._is_whole else self._exchange(pack(maxima, columns, first_token))

    def _exchange(self, best: torch.Tensor) -> torch.Tensor:
        return unpack(self._tp_group.all_gather(best[None], dim=0).amax(dim=0))


def pack(logits: torch.Tensor, columns: torch.Tensor, first_token: int) -> torch.Tensor:
    """Keys that order by logit, and by descending token id among equal logits.

    Args:
        logits: [rows] float32, bfloat16 or float16, without NaN.
        columns: [rows] int64, so that the token id is `first_token + columns`, below 2**31.

    Returns:
        [rows] int64.
    """
    bits = logits.view(_BITS[logits.dtype])
    lowest = torch.iinfo(bits.dtype).min
    # Negative floats order backwards, from the bits of -0.0, the lowest integer; this puts -0.0 where 0.0 is.
    ordered = torch.where(bits < 0, lowest - bits, bits)
    return torch.add(-first_token - columns, ordered, alpha=2**_TOKEN_BITS)


def unpack(keys: torch.Tensor) -> torch.Tensor:
    """Token ids of keys made by `pack`: [rows] int64 in and out."""
    return -keys & _TOKEN_MASK
