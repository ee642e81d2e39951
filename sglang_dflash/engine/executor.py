"""Execution of a decode cycle's two forwards: eagerly, or while a CUDA graph is captured.

Shapes as in :mod:`sglang_dflash.types`: bs requests, P requests of a CUDA graph, W draft length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.speculative.spec_utils import GrammarTree

from sglang_dflash.attention.plan import BlockPlan


class CycleExecutor(Protocol):
    """Runs the forwards of a cycle, and sends its drafts to the CPU.

    Attributes:
        draft_backend: the drafter's attention, for blocks of W tokens.
    """

    draft_backend: AttentionBackend

    def plan_draft(self, batch: ForwardBatch) -> None:
        """Prepare `draft_backend` for the drafter's batch."""

    def send_drafts(self, block_tokens: torch.Tensor) -> GrammarTree | None:
        """Start to copy the drafted blocks to the CPU while the target verifies them, if grammars need them there.

        Args:
            block_tokens: [bs, W] int64.
        """

    def verify(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        """Run the target."""


@dataclass(frozen=True)
class EagerExecutor:
    """Executor of a cycle without a graph.

    Attributes:
        draft_backend: see :class:`CycleExecutor`.
        has_grammar: the batch has a request with a grammar.
        verify: runs the target.
    """

    draft_backend: AttentionBackend
    has_grammar: bool
    verify: Callable[[ForwardBatch], LogitsProcessorOutput]

    def plan_draft(self, batch: ForwardBatch) -> None:
        self.draft_backend.init_forward_metadata(batch)

    def send_drafts(self, block_tokens: torch.Tensor) -> GrammarTree | None:
        return GrammarTree.from_linear_chain(block_tokens) if self.has_grammar else None


@dataclass(frozen=True)
class CapturingExecutor:
    """Executor of a cycle that a CUDA graph captures. A replay sends its drafts in any case.

    Attributes:
        draft_backend: see :class:`CycleExecutor`.
        draft_plan: attention metadata of the drafter's blocks, made in the graph; None where W is 1.
        target_plan: attention metadata of the verified tokens.
        forward: the target's forward, as SGLang captures it.
        drafts: [P, W] int64, pinned. Takes the blocks.
        has_drafted: external event, recorded in the graph once `drafts` are on the CPU. The host waits for it while the
            rest of the graph runs.
    """

    draft_backend: AttentionBackend
    draft_plan: BlockPlan | None
    target_plan: BlockPlan
    forward: Callable[[ForwardBatch], LogitsProcessorOutput]
    drafts: torch.Tensor
    has_drafted: torch.cuda.Event

    def plan_draft(self, batch: ForwardBatch) -> None:
        self.draft_plan.record(batch)

    def send_drafts(self, block_tokens: torch.Tensor) -> None:
        self.drafts.copy_(block_tokens, non_blocking=True)
        self.has_drafted.record()

    def verify(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        self.target_plan.record(batch)
        return self.forward(batch)
