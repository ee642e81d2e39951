"""Largest logits over a vocabulary that is sharded among tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sglang_dflash import ops
from sglang_dflash.vocab.shard import VocabShard

# Largest logits, [T, k] float32, descending. Their tokens, [T, k] int64. Log-sum-exp of all logits, [T] float32; None:
# it was not computed.
Top = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class VocabTop:
    """Finds the k largest logits.

    Each rank reduces its own shard, and ranks exchange their results in one all-gather. All ranks then hold the same
    numbers, bit for bit.
    """

    def __init__(self, lm_head: VocabParallelEmbedding, tp_group: GroupCoordinator, k: int) -> None:
        """
        Args:
            lm_head: computes the logits.
            tp_group: ranks that share it.
            k: logits to find. The vocabulary has at least as many tokens.
        """
        self._k, self._shard = k, VocabShard(lm_head, tp_group)

    def __call__(self, logits: torch.Tensor) -> Top:
        """Reduce logits, [T, columns of the shard], float32, bfloat16 or float16, to the same result on every rank."""
        tops = [self._of_part(columns, first_token) for columns, first_token in self._shard.split(logits)]
        return self._across_ranks(self._merge(tops or [_nothing(logits)]))

    def of_one_part(self, values: torch.Tensor, columns: torch.Tensor, log_sums: torch.Tensor | None) -> Top:
        """Reduce the k best logits, [T, k], of a shard that is one part, their columns and log-sum-exps."""
        first_token = self._shard.first_token
        return self._across_ranks((values, columns + first_token if first_token else columns, log_sums))

    def _across_ranks(self, mine: Top) -> Top:
        if not self._shard.has_other_ranks:
            return mine
        return self._merge([_unpack(rank) for rank in self._shard.gather(_pack(*mine))])

    def _of_part(self, columns: torch.Tensor, first_token: int) -> Top:
        values, places, log_sums = ops.top_columns(columns, min(self._k, columns.shape[1]))
        return values, places + first_token if first_token else places, log_sums

    def _merge(self, tops: Sequence[Top]) -> Top:
        if len(tops) == 1 and tops[0][0].shape[1] == self._k:
            return tops[0]
        values, tokens = (torch.cat(parts, dim=1) for parts in zip(*((v, t) for v, t, _ in tops), strict=True))
        log_sums = [log_sum for _, _, log_sum in tops if log_sum is not None]
        log_sums = torch.stack(log_sums).logsumexp(dim=0) if log_sums else None
        missing = max(0, self._k - values.shape[1])
        # The shard has fewer tokens.
        values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
        tokens = torch.nn.functional.pad(tokens, (0, missing))
        best, places, _ = ops.top_columns(values, self._k)
        return best, tokens.gather(1, places), log_sums


def _nothing(logits: torch.Tensor) -> Top:
    """Return the result of a rank that has no token of a small vocabulary."""
    rows = logits.shape[0]
    values = torch.empty((rows, 0), device=logits.device)
    return values, values.to(torch.int64), torch.full((rows,), -torch.inf, device=logits.device)


def _pack(values: torch.Tensor, tokens: torch.Tensor, log_sums: torch.Tensor | None) -> torch.Tensor:
    """Return a result as [T, 2 k + 1] int64, or [T, 2 k] without sums, for :meth:`VocabShard.gather`."""
    sums = [] if log_sums is None else [log_sums.view(torch.int32)[:, None]]
    return torch.cat((values.view(torch.int32), tokens, *sums), dim=1)


def _unpack(packed: torch.Tensor) -> Top:
    k, has_sums = divmod(packed.shape[1], 2)
    values, tokens, log_sums = packed.split((k, k, has_sums), dim=1)
    log_sums = log_sums[:, 0].to(torch.int32).view(torch.float32) if has_sums else None
    return values.to(torch.int32).view(torch.float32), tokens, log_sums
