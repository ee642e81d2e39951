"""Texts of running requests, from which trees copy what followed before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.utils.common import async_h2d_stack

from sglang_dflash import ops
from sglang_dflash.ops.copies import NO_TOKEN, TEXT_DTYPE, TEXT_SIZE
from sglang_dflash.types import Block


class Texts:
    """The last tokens of each running request's text; see :mod:`sglang_dflash.ops.copies`.

    They are kept on the device and include what the last cycle committed, which the host has not seen yet.
    `Bigrams.add` writes it. All tensor-parallel ranks have the same texts. How long a text is follows from the
    request's sequence length. So a slot needs no clearing: tokens of an earlier request are at places that the text has
    not reached.

    Attributes:
        tokens: [request slots, TEXT_SIZE] int32. CUDA graphs hold its address.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        """
        Args:
            num_slots: rows of `req_to_token`, or more.
            vocab_size: of the target.
        """
        self.tokens = torch.full((num_slots, TEXT_SIZE), NO_TOKEN, dtype=TEXT_DTYPE, device=device)
        self._vocab_size = vocab_size

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes

    def begin(self, batch: ScheduleBatch, next_token_ids: torch.Tensor) -> None:
        """Begin texts after a prefill: the prompt, what was generated before a retraction, and the next token.

        Requests that decode in a mixed batch, its last ones, get the next token alone. Their texts are ahead of the
        scheduler.

        Args:
            next_token_ids: [bs]. Of a prompt that is not prefilled to its end it means nothing. The next chunk begins
                anew.
        """
        num_prefills = len(batch.reqs) - len(batch.decoding_reqs or [])
        if num_prefills:
            texts = [_known(req.origin_input_ids, req.output_ids) for req in batch.reqs[:num_prefills]]
            self._write(batch.req_pool_indices[:num_prefills], texts)
        self._append(batch.req_pool_indices, batch.seq_lens, next_token_ids)

    def begin_transferred(self, batch: ScheduleBatch) -> None:
        """Begin texts of requests that another server has prefilled. Their first token is in their output."""
        self._write(batch.req_pool_indices, [_known(req.origin_input_ids, req.output_ids) for req in batch.reqs])

    def _append(self, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write one token of each request, [n] integers, at its position."""
        none, one = torch.zeros_like(rows), torch.ones_like(rows)
        ops.write_texts(self.tokens, rows, positions, tokens[:, None], one, none)

    def _write(self, rows: torch.Tensor, texts: list[tuple[int, np.ndarray]]) -> None:
        """Write whole texts, each as the position of its first token that is kept and these tokens."""
        packed = np.zeros((len(texts), 2 + max(len(tokens) for _, tokens in texts)), dtype=np.int32)
        for row, (start, tokens) in zip(packed, texts, strict=True):
            row[:2] = start, len(tokens)
            row[2 : 2 + len(tokens)] = np.where((tokens >= 0) & (tokens < self._vocab_size), tokens, NO_TOKEN)
        [sent] = async_h2d_stack([torch.from_numpy(packed)], device=self.tokens.device)
        starts, lens = sent[:, :2].t().contiguous()
        ops.write_texts(self.tokens, rows, starts, sent[:, 2:], lens, torch.zeros_like(rows))


@dataclass(frozen=True)
class Copies:
    """Copies that trees take from the texts of bs requests, see :mod:`sglang_dflash.ops.copies`.

    Attributes:
        places, lens: of `ops.place_copies`; None: nothing is copied.
    """

    places: torch.Tensor | None
    lens: torch.Tensor | None

    @classmethod
    def place(cls, texts: torch.Tensor | None, block: Block, candidates: torch.Tensor, logits: torch.Tensor) -> Copies:
        """Make copies candidates, before the table of conditionals is filled.

        Args:
            texts: `Texts.tokens`. None: nothing is copied.
            block: the same requests.
            candidates, logits: [bs, W - 1, K]; changed.
        """
        if texts is None:
            return cls(None, None)
        requests = (block.req_pool_indices, block.seq_lens, block.is_chain)
        return cls(*ops.place_copies(texts, *requests, candidates, logits))


def _known(prompt: list[int], output: list[int]) -> tuple[int, np.ndarray]:
    """Return the last tokens of a text that are kept, [at most TEXT_SIZE] int64, and the position of the first."""
    tokens = np.concatenate([np.asarray(part[-TEXT_SIZE:], dtype=np.int64) for part in (prompt, output)])[-TEXT_SIZE:]
    return len(prompt) + len(output) - len(tokens), tokens
