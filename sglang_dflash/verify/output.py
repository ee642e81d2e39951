"""Results of a decode cycle.

Shapes as in :mod:`sglang_dflash.types`: bs requests, W draft length, N verified tokens, K candidates, F captured target
layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.speculative.spec_utils import GrammarTree

from sglang_dflash.types import Acceptance


@dataclass(frozen=True)
class Verified:
    """Tokens that the target has accepted.

    Attributes:
        accepted: of each request.
        hidden_states: [bs * W, F * H]. The target's captured hidden states, of the chain's or the accepted path's
            tokens.
        paths: [bs, W] int64. Nodes of the accepted paths; 0 to W - 1 for chains. Nodes after the accepted ones do not
            matter. In the memory of a CUDA graph, until its next replay.
        tree_counts: [N + K] int64, summed over all cycles with trees of N nodes: requests that accepted each node, then
            accepted drafts that were the first, second, ... candidate of their position. None: nobody reads them.
    """

    accepted: Acceptance
    hidden_states: torch.Tensor
    paths: torch.Tensor
    tree_counts: torch.Tensor | None = None

    def take(self, bs: int) -> Verified:
        """Return the first `bs` requests. `accepted` is a copy that the next replay cannot overwrite."""
        draft_length = self.accepted.out_tokens.shape[1]
        hidden_states = self.hidden_states[: bs * draft_length]
        return Verified(self.accepted.take(bs), hidden_states, self.paths[:bs], self.tree_counts)


@dataclass(frozen=True)
class CycleOutput:
    """Result of one cycle.

    Attributes:
        batch: the target's, N tokens of each request. For a request with a chain the first W are its block.
        target_output: the target's logits, [bs * N, V] or a shard of V, and hidden states.
        verified: what was accepted. The drafter's context has these tokens.
        grammar_tree: the blocks on their way to the CPU; None: the batch has no grammars.
        is_replay: a CUDA graph was replayed.
    """

    batch: ForwardBatch
    target_output: LogitsProcessorOutput
    verified: Verified
    grammar_tree: GrammarTree | None
    is_replay: bool = False

    @property
    def accepted(self) -> Acceptance:
        return self.verified.accepted

    @property
    def block_tokens(self) -> torch.Tensor:
        """[bs, W] int64. The bonus token and the drafts of each request that has a chain."""
        return self.of_blocks(self.batch.input_ids)

    @property
    def positions(self) -> torch.Tensor:
        """[bs, W] int64. Positions of `block_tokens`."""
        return self.of_blocks(self.batch.positions)

    def of_blocks(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [bs, W, ...] of rows [bs * N, ...] or [bs * W, ...]."""
        bs, draft_length = self.accepted.out_tokens.shape
        return rows.unflatten(0, (bs, -1))[:, :draft_length]
