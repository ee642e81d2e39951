"""Bigram tables of running requests: which token follows which in their texts, for drafts."""

from __future__ import annotations

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.utils.common import async_h2d, async_h2d_stack

from sglang_dflash import ops
from sglang_dflash.draft.texts import Texts
from sglang_dflash.ops.bigrams import TABLE_DTYPE, TABLE_SIZE
from sglang_dflash.types import Acceptance


class Bigrams:
    """Pairs of consecutive tokens in the text of each running request; see :mod:`sglang_dflash.ops.bigrams`.

    They are kept on the device and include what the last cycle committed, which the host has not seen yet. All
    tensor-parallel ranks have the same tables.

    Attributes:
        tables: [request slots, TABLE_SIZE] int16. CUDA graphs hold its address.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        """
        Args:
            num_slots: rows of `req_to_token`, or more.
        """
        self.tables = torch.zeros((num_slots, TABLE_SIZE), dtype=TABLE_DTYPE, device=device)

    @property
    def nbytes(self) -> int:
        return self.tables.nbytes

    def begin(self, batch: ScheduleBatch, next_token_ids: torch.Tensor) -> None:
        """Begin tables after a prefill: the prompt, what was generated before a retraction, and the next token.

        Requests that decode in a mixed batch, its last ones, keep their tables, which are ahead of the scheduler.

        Args:
            next_token_ids: [bs]. Of a prompt that is not prefilled to its end it means nothing. The next chunk begins
                anew.
        """
        num_decoding = len(batch.decoding_reqs or [])
        num_prefills = len(batch.reqs) - num_decoding
        rows = batch.req_pool_indices
        if num_prefills:
            texts = torch.from_numpy(_texts(batch.reqs[:num_prefills]))
            [texts] = async_h2d_stack([texts], device=self.tables.device)
            ops.begin_bigrams(self.tables, rows[:num_prefills], texts, next_token_ids[:num_prefills])
        if num_decoding:
            extend_lens = async_h2d(batch.extend_lens, dtype=torch.int32, device=self.tables.device)
            last_rows = extend_lens.cumsum(0)[num_prefills:] - 1
            before, written = batch.input_ids[last_rows], next_token_ids[num_prefills:, None]
            ones, no_chain = torch.ones_like(before), torch.zeros_like(before)
            ops.add_bigrams(self.tables, rows[num_prefills:], before, written, ones, no_chain)

    def begin_transferred(self, batch: ScheduleBatch) -> None:
        """Begin tables of requests that another server has prefilled. Their first token is in their output."""
        texts = torch.from_numpy(_texts(batch.reqs, last_is_apart=True))
        [texts] = async_h2d_stack([texts], device=self.tables.device)
        last = [req.output_ids[-1] for req in batch.reqs]
        last_tokens = async_h2d(last, dtype=torch.int64, device=self.tables.device)
        ops.begin_bigrams(self.tables, batch.req_pool_indices, texts, last_tokens)

    def add(
        self,
        rows: torch.Tensor,
        bonus_tokens: torch.Tensor,
        accepted: Acceptance,
        is_left_out: torch.Tensor | None = None,
        texts: Texts | None = None,
        seq_lens: torch.Tensor | None = None,
    ) -> None:
        """Add the tokens that requests have accepted in a cycle, to their texts too.

        Args:
            rows: [n] int64. Rows of `req_to_token`.
            bonus_tokens: [n] int64. First tokens of their blocks. May be strided.
            accepted: of the same requests.
            is_left_out: [n] int64. 1 for requests that are left out. None: all are added.
            texts: of all running requests. None: there are none.
            seq_lens: [n] int64. Positions of `bonus_tokens`, which `texts` need.
        """
        is_left_out = torch.zeros_like(rows) if is_left_out is None else is_left_out
        added = (rows, bonus_tokens, accepted.out_tokens, accepted.accept_lens, is_left_out)
        ops.add_bigrams(self.tables, *added, None if texts is None else texts.tokens, seq_lens)


def _texts(reqs: list[Req], last_is_apart: bool = False) -> np.ndarray:
    """Return [bs, 1 + L] int32: the length of each text, and its last tokens that a table has room for.

    Args:
        last_is_apart: the last token of each request is left out.
    """
    outputs = [req.output_ids[:-1] if last_is_apart else req.output_ids for req in reqs]
    texts = [
        (req.origin_input_ids[-TABLE_SIZE:] + output[-TABLE_SIZE:])[-TABLE_SIZE:]
        for req, output in zip(reqs, outputs, strict=True)
    ]
    rows = np.zeros((len(texts), 1 + max(map(len, texts))), dtype=np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[0] = len(text)
        # Tokens of images are larger than any vocabulary. 32 bits of them are enough.
        row[1 : 1 + len(text)] = np.asarray(text, dtype=np.int64).astype(np.int32)
    return rows
