"""What the texts of running requests say about which token follows which, for trees of drafts."""

from __future__ import annotations

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.utils.common import async_h2d, async_h2d_stack

from sglang_dflash import ops
from sglang_dflash.ops.bigrams import TABLE_DTYPE, TABLE_SIZE, tables_of
from sglang_dflash.verify.acceptance import Acceptance


class Bigrams:
    """The pairs of tokens that each running request has in its text; see :mod:`sglang_dflash.ops.bigrams`.

    They are kept on the device, up to what the last cycle committed, which the host has not seen yet. All tensor-
    parallel ranks have the same.

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

    def begin(self, batch: ScheduleBatch, last_rows: torch.Tensor, next_token_ids: torch.Tensor) -> None:
        """Behind a prefill: begin with the prompts, and what was generated before a retraction.

        Requests that decode in a mixed batch, its last ones, have tables that go further than the scheduler has seen.

        Args:
            last_rows: [bs] int64, of `batch.input_ids`, the last of each request.
            next_token_ids: [bs], the token that each writes; of a prompt that goes on it means nothing, and is
                forgotten with the next part.
        """
        num_prefills = len(batch.reqs) - len(batch.decoding_reqs or [])
        texts, device = [_last_tokens(req) for req in batch.reqs[:num_prefills]], self.tables.device
        if texts:
            lens = [len(text) for text in texts]
            padded = np.zeros((len(texts), max(lens)), dtype=np.int64)
            for row, text in zip(padded, texts, strict=True):
                row[: len(text)] = text
            [padded] = async_h2d_stack([torch.from_numpy(padded)], device=device)
            lens = async_h2d(lens, dtype=torch.int64, device=device)
            self.tables[batch.req_pool_indices[:num_prefills]] = tables_of(padded, lens)
        written = next_token_ids.to(torch.int64)[:, None]
        ones, no_chain = torch.ones_like(last_rows), torch.zeros_like(last_rows)
        last_tokens = batch.input_ids[last_rows]
        ops.add_bigrams(self.tables, batch.req_pool_indices, last_tokens, written, ones, no_chain)

    def add(
        self, rows: torch.Tensor, bonus_tokens: torch.Tensor, accepted: Acceptance, is_chain: torch.Tensor | None = None
    ) -> None:
        """Behind a cycle: go on with what requests have accepted.

        Args:
            rows: [n] int64, the requests' rows of `req_to_token`.
            bonus_tokens: [n] int64, what their blocks began with; may be strided.
            accepted: of the same requests.
            is_chain: [n] int64, 1 for requests that are left out; None: none is.
        """
        is_chain = torch.zeros_like(rows) if is_chain is None else is_chain
        ops.add_bigrams(self.tables, rows, bonus_tokens, accepted.out_tokens, accepted.accept_lens, is_chain)


def _last_tokens(req: Req) -> np.ndarray:
    """int64, those of a text whose pairs a table has room for."""
    tokens = req.origin_input_ids[-TABLE_SIZE:] + req.output_ids[-TABLE_SIZE:]
    return np.asarray(tokens[-TABLE_SIZE:], dtype=np.int64)
