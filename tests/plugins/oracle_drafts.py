"""Test plugin: dummy weights that write varied text, and drafts that are the target's own text.

They show whether every token of a target's verification is right, for any class and without a trained drafter.
`support.plugins` installs it. `ORACLE_DRAFTS` names a JSON file: a list of `{"input_ids", "output_ids"}` of requests
to draft for, wrong drafts included. Without it, only the weights are replaced. `ORACLE_CANDIDATES` names a JSON file
for servers that verify trees: the logits of the candidates per depth, in descending order. The token to draft at
position p has rank p % RANKS.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import torch

DRAFTS, CANDIDATES = os.environ.get("ORACLE_DRAFTS"), os.environ.get("ORACLE_CANDIDATES")
RANKS = 3
VOCAB_SIZE = 512


@torch.no_grad()
def initialize(model: torch.nn.Module, *unused, **unused_too) -> None:
    """Replace SGLang's `initialize_dummy_weights`, whose logits are all about zero.

    Sharp attention makes keys matter, and keeps the text from repeating. Experts add little, because rounding chooses
    between two of about equal score.
    """
    for name, weight in model.state_dict().items():
        if not weight.is_floating_point():
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if weight.numel() == 1 or "norm" in name or "scal" in name:
            # Norms of queries and keys are large.
            values = torch.full(weight.shape, 2.0 if "q_norm" in name or "k_norm" in name else 1.0)
        elif "correction_bias" in name:
            values = torch.zeros(weight.shape)
        elif weight.dim() == 1:
            values = torch.randn(weight.shape, generator=generator) * (1.0 if "sinks" in name else 0.1)
        else:
            values = torch.randn(weight.shape, generator=generator) * _scale(model, name, weight.shape)
        weight.copy_(values)


def _scale(model: torch.nn.Module, name: str, shape: torch.Size) -> float:
    if "embed_tokens" in name:
        # Gemma multiplies embeddings by the root of the hidden size.
        return shape[-1] ** -0.5 if type(model).__name__.startswith("Gemma") else 1.0
    factor = 1.0
    if "lm_head" in name:
        factor = 4.0
    elif "q_proj" in name or "k_proj" in name or "qkv" in name or "q_b_proj" in name:
        factor = 1.5
    elif "w2_weight" in name:
        factor = 0.1
    return factor * shape[-1] ** -0.5


class Drafts:
    """Tokens to draft at every position of every request, in rows like those of `req_to_token`.

    Args:
        requests: content of `ORACLE_DRAFTS`.
        logits: [W - 1, K]. Content of `ORACLE_CANDIDATES`, for servers that verify trees.
    """

    def __init__(self, requests: list[dict], logits: list[list[float]] | None) -> None:
        self._logits = None if logits is None else torch.tensor(logits)
        self._texts = {tuple(r["input_ids"]): r["input_ids"] + r["output_ids"] for r in requests}
        self.table: torch.Tensor | None = None

    def allocate(self, req_to_token: torch.Tensor) -> None:
        self.table = torch.zeros_like(req_to_token, dtype=torch.int64)
        # Copied now, because graph capture cannot copy from the CPU.
        if self._logits is not None:
            self._logits = self._logits.to(req_to_token.device)

    def begin(self, req) -> None:
        """Set the tokens of a request that is about to be prefilled."""
        text = self._texts.get(tuple(req.origin_input_ids))
        if text is not None:
            self.table[req.kv.req_pool_idx, : len(text)] = torch.tensor(text, device=self.table.device)

    def at(self, batch) -> torch.Tensor:
        """Return the tokens of a batch of blocks without the first of each: [bs, W - 1] int64."""
        positions = batch.positions.view(len(batch.req_pool_indices), -1)[:, 1:].clamp(max=self.table.shape[1] - 1)
        return self.table[batch.req_pool_indices[:, None], positions]

    def write(self, rows: torch.Tensor, batch) -> torch.Tensor:
        """Replace all but the first token of each row: rows [bs, W] int64."""
        rows[:, 1:] = self.at(batch)
        return rows

    def candidates(self, block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return candidates as `DraftHead.candidates` does. Other candidates differ from the draft by at least 2."""
        tokens = self.at(block)[:, :, None]
        bs, depths, k = *tokens.shape[:2], self._logits.shape[1]
        ranks = torch.arange(k, device=tokens.device)
        own = block.positions.view(bs, -1)[:, 1:, None] % RANKS
        tokens = torch.where(ranks == own, tokens, (tokens + 2 + ranks) % VOCAB_SIZE)
        logits = self._logits[:depths].expand(bs, -1, -1).contiguous()
        return tokens, logits, logits.logsumexp(dim=-1)


def keep_whole_windows() -> None:
    """Make SGLang's plain decoding on Triton see whole windows.

    It leaves out the farthest key of a window, which prompts, blocks and other backends see. The cause is that it
    counts the query's own key among those before it (`update_sliding_window_buffer`).
    """
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.runtime_context import get_spec

    init = TritonAttnBackend.__init__

    def with_whole_windows(backend, *args, **kwargs):
        init(backend, *args, **kwargs)
        # In prompts, masks hide the keys past a layer's window.
        if get_spec().speculative_algorithm is None and (backend.sliding_window_size or 0) > 0:
            backend.sliding_window_size += 1

    TritonAttnBackend.__init__ = with_whole_windows


def _read(path: str | None) -> list | None:
    return None if path is None else json.loads(Path(path).read_text())


def register() -> None:
    from sglang.srt.model_loader import loader

    loader.initialize_dummy_weights = initialize
    if torch.cuda.is_available():
        keep_whole_windows()
    if DRAFTS is None:
        return
    from sglang_dflash.engine.verification import ChainVerification, TreeVerification
    from sglang_dflash.engine.worker import DFlashWorker

    drafts = Drafts(_read(DRAFTS), _read(CANDIDATES))
    alloc_memory_pool, prefill, draft = DFlashWorker.alloc_memory_pool, DFlashWorker._prefill, ChainVerification.draft

    def allocate(worker, *args, **kwargs):
        alloc_memory_pool(worker, *args, **kwargs)
        drafts.allocate(worker.req_to_token_pool.req_to_token)

    def begin(worker, batch, on_publish):
        for req in batch.reqs:
            drafts.begin(req)
        return prefill(worker, batch, on_publish)

    def overwrite(verification, head, hidden_states, batch, block):
        drafted = draft(verification, head, hidden_states, batch, block)
        drafts.write(drafted.block_tokens, batch)
        return drafted

    DFlashWorker.alloc_memory_pool, DFlashWorker._prefill, ChainVerification.draft = allocate, begin, overwrite
    if CANDIDATES is None:
        return
    draft_trees = TreeVerification.draft

    def draft_from(verification, head, hidden_states, batch, block):
        head.candidates = lambda hidden_states, bs: drafts.candidates(block)
        return draft_trees(verification, head, hidden_states, batch, block)

    TreeVerification.draft = draft_from
