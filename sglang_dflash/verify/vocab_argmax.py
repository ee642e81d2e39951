"""The argmax over a vocabulary of which each tensor-parallel rank has a part of the columns."""

from __future__ import annotations

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sglang_dflash import ops
from sglang_dflash.verify.vocab_shard import VocabShard

# Integers of a float's width: its bits, read as one, order like the float where it is not negative.
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_TOKEN_BITS = 32
_TOKEN_MASK = 2**_TOKEN_BITS - 1


class VocabArgmax:
    """Each rank reduces its own shard of the vocabulary, and ranks exchange one int64 per row: the best logit above,
    the token below (`pack`), so that the largest one is the answer.

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
        self._shard = VocabShard(lm_head, tp_group)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Token with the largest logit among all ranks, the lowest id of equals.

        Args:
            logits: [rows, columns of the shard] float32, bfloat16 or float16, without NaN.

        Returns:
            [rows] int64, the same on every rank.
        """
        found = [(*ops.row_max(columns), first_token) for columns, first_token in self._shard.split(logits)]
        if self._shard.is_whole:
            [(_, tokens, _)] = found
            return tokens
        keys = [pack(*best) for best in found]
        if not keys:
            keys = [torch.full((logits.shape[0],), torch.iinfo(torch.int64).min, device=logits.device)]
        return self._across_ranks(torch.stack(keys).amax(dim=0))

    def of_one_part(self, maxima: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """The same, where this rank's shard is one part of the vocabulary, of its best logits and their columns."""
        if self._shard.is_whole:
            return columns
        return self._across_ranks(pack(maxima, columns, self._shard.first_token))

    def _across_ranks(self, keys: torch.Tensor) -> torch.Tensor:
        return unpack(self._shard.gather(keys).amax(dim=0))


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
