"""Memory of one request's drafts in a cycle, beside the drafter's layers and the logits of its vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_dflash.checkpoint.config import MARKOV, SELECTOR, DFlashConfig, Pairs

# An entry of the table: a log probability and the number of a candidate.
_ENTRY_BYTES = torch.float32.itemsize + torch.uint8.itemsize
# A candidate: its token and logit.
_CANDIDATE_BYTES = torch.int64.itemsize + torch.float32.itemsize


@dataclass(frozen=True)
class DraftMemory:
    """Bytes of one request on one rank. Letters: W draft length, K candidates, r rank of pairs, H hidden size.

    Attributes:
        table: W - 1 positions of K candidates, and the table of how probable each is after each of the position before.
        pairs: factors or gates of vectors, for drafters that score pairs of drafts.
        convolutions: weights of rows and the result of one convolution, for drafters that have some.
    """

    table: int
    pairs: int
    convolutions: int

    @classmethod
    def of(
        cls, config: DFlashConfig, block_size: int, num_candidates: int, itemsize: int, tp_size: int = 1
    ) -> DraftMemory:
        """Return the memory of drafts of W = `block_size`.

        Args:
            config: of the drafter.
            block_size: W.
            num_candidates: K of a drafter that has no number of its own.
            itemsize: bytes of one number of the model.
            tp_size: ranks that share the drafter.
        """
        pairs, num_drafts = config.pairs, block_size - 1
        k = config.num_candidates(num_candidates)
        num_convolved = 0
        if config.conv is not None:
            weights = 2 * config.conv.taps * (config.hidden_size // config.conv.group_size)
            num_convolved = config.draft_rows(block_size) * (weights + config.hidden_size)
        return cls(
            table=num_drafts * k * (k * _ENTRY_BYTES + _CANDIDATE_BYTES),
            pairs=0 if pairs is None else _pair_bytes(pairs, num_drafts, itemsize, tp_size),
            convolutions=num_convolved * itemsize,
        )


def _pair_bytes(pairs: Pairs, num_drafts: int, itemsize: int, tp_size: int) -> int:
    """Return the bytes that exist at a time while the factors or gates of the drafts' vectors are computed."""
    if pairs.kind == MARKOV:
        return 0
    vector = pairs.rank * itemsize
    if pairs.kind == SELECTOR:
        # A part is gathered, and the whole is put in order.
        return num_drafts * vector * (1 if tp_size == 1 else 3)
    # For each candidate its part, the sum with the hidden state's part, and the gate. The tokens before all candidates.
    tokens = (num_drafts + 1) * pairs.num_candidates * torch.int64.itemsize
    return num_drafts * vector * (3 * pairs.num_candidates + 1) + tokens
