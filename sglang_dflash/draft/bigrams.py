"""What the texts of running requests say about which token follows which, for trees of drafts."""

from __future__ import annotations

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.utils.common import async_h2d, async_h2d_stack

from sglang_dflash import ops
from sglang_dflash.ops.bigrams import TABLE_DTYPE, TABLE_SIZE
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

    def begin(self, batch: ScheduleBatch, next_token_ids: torch.Tensor) -> None:
        """Behind a prefill: begin with the prompts, what was generated before a retraction, and the next token.

        Requests that decode in a mixed batch, its last ones, have tables that go further than the scheduler has seen.

        Args:
            next_token_ids: [bs], the token that each writes; of a prompt that goes on it means nothing, and is
                forgotten with the next part.
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


def _texts(reqs: list[Req]) -> np.ndarray:
    """[bs, 1 + L] int32, of each text how many tokens, and them: the last ones, whose pairs a table has room for."""
    texts = [(req.origin_input_ids[-TABLE_SIZE:] + req.output_ids[-TABLE_SIZE:])[-TABLE_SIZE:] for req in reqs]
    rows = np.zeros((len(texts), 1 + max(map(len, texts))), dtype=np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[0] = len(text)
        # Tokens of images are larger than any vocabulary: 32 bits of them are enough.
        row[1 : 1 + len(text)] = np.asarray(text, dtype=np.int64).astype(np.int32)
    return rows
