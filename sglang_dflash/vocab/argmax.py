"""Argmax over a vocabulary that is sharded among tensor-parallel ranks."""

from __future__ import annotations

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sglang_dflash import ops
from sglang_dflash.vocab.shard import VocabShard

# Integer dtype of a float's width. Bits of non-negative floats, read as integers, have the order of the floats.
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_TOKEN_BITS = 32
_TOKEN_MASK = 2**_TOKEN_BITS - 1


class VocabArgmax:
    """Finds the token with the largest logit.

    Each rank reduces its own shard, and ranks exchange one int64 per token: the best logit in the high bits, its token
    in the low bits (`pack`). The largest one is the answer. So all ranks choose the same tokens, even if their logits
    differ by rounding. Of equal logits the lowest token id is chosen, on any number of ranks.
    """

    def __init__(self, lm_head: VocabParallelEmbedding, tp_group: GroupCoordinator) -> None:
        """
        Args:
            lm_head: computes the logits.
            tp_group: ranks that share it.
        """
        self._shard = VocabShard(lm_head, tp_group)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the tokens with the largest logits among all ranks.

        Args:
            logits: [T, columns of the shard] float32, bfloat16 or float16, without NaN.

        Returns:
            [T] int64, the same on every rank.
        """
        found = [(*ops.row_max(columns), first_token) for columns, first_token in self._shard.split(logits)]
        if self._shard.is_whole:
            [(_, tokens, _)] = found
            return tokens
        keys = [pack(*best) for best in found]
        if not keys:
            keys = [torch.full((logits.shape[0],), torch.iinfo(torch.int64).min, device=logits.device)]
        return self._among_ranks(torch.stack(keys).amax(dim=0))

    def of_one_part(self, maxima: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Do the same for the largest logits, [T], of a shard that is one part, and their columns, [T] int64."""
        if self._shard.is_whole:
            return columns
        return self._among_ranks(pack(maxima, columns, self._shard.first_token))

    def _among_ranks(self, keys: torch.Tensor) -> torch.Tensor:
        return unpack(self._shard.gather(keys).amax(dim=0))


def pack(logits: torch.Tensor, columns: torch.Tensor, first_token: int) -> torch.Tensor:
    """Return keys that are ordered by logit, and by descending token id among equal logits.

    Args:
        logits: [T] float32, bfloat16 or float16, without NaN.
        columns: [T] int64. The token id is `first_token + columns`, below 2**31.

    Returns:
        [T] int64
    """
    bits = logits.view(_BITS[logits.dtype])
    lowest = torch.iinfo(bits.dtype).min
    # Bits of negative floats have the reverse order, from -0.0, the lowest integer, on. This maps -0.0 to 0.0.
    ordered = torch.where(bits < 0, lowest - bits, bits)
    return torch.add(-first_token - columns, ordered, alpha=2**_TOKEN_BITS)


def unpack(keys: torch.Tensor) -> torch.Tensor:
    """Return the token ids, [T] int64, of keys made by `pack`."""
    return -keys & _TOKEN_MASK
