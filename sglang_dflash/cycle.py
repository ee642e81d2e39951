"""What the GPU does in a decode cycle, step by step: recorded in a CUDA graph, or run as it is.

Shapes: bs requests, W rows of each block: B, or fewer with `--speculative-adaptive`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sglang_dflash import ops
from sglang_dflash.accept import Acceptance
from sglang_dflash.context import ContextWriter
from sglang_dflash.draft_head import DraftHead
from sglang_dflash.draft_window import DraftWindow
from sglang_dflash.reference.prepare_block import Block
from sglang_dflash.simulate import SimulatedAcceptance
from sglang_dflash.verify_logits import VerifyLogits


class DecodeCycle:
    """The steps around the target's forward. A TARGET_VERIFY batch travels between them, whose `spec_info` knows W as
    `draft_token_num`."""

    def __init__(
        self, draft_runner: ModelRunner, target_model: nn.Module, block_size: int, window: DraftWindow | None
    ) -> None:
        self.block_size = block_size
        self.draft_runner = draft_runner
        self._model = draft_runner.model
        self._window = window
        self._head = DraftHead.of(self._model, target_model.lm_head, get_parallel().tp_group)
        self.logits = VerifyLogits(target_model, get_parallel().tp_group)
        self._context = ContextWriter(self._model, draft_runner.token_to_kv_pool)
        self._simulated = SimulatedAcceptance.from_environment(draft_runner.device)

    def reload_weights(self) -> None:
        """The drafter's weights have changed."""
        self._context.fuse_weights()

    def begin(self) -> None:
        """On the host, before every cycle."""
        if self._simulated is not None:
            self._simulated.draw(self.block_size)

    def draft_batch(self, batch: ForwardBatch, kv_lens: torch.Tensor) -> ForwardBatch:
        """The drafter's batch of the target's blocks; its `seq_lens` are still the target's.

        Args:
            kv_lens: [bs] on the CPU, for planning: lengths with the block, or upper bounds of them.
        """
        if self._window is not None:
            kv_lens = self._window.host_kv_lens(kv_lens)
        return replace(
            batch,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            seq_lens_cpu=kv_lens,
            seq_lens_sum=int(kv_lens.sum()),
        )

    def draft(
        self,
        batch: ForwardBatch,
        kv_lens: torch.Tensor,
        attn_backend: AttentionBackend,
        lay_out: Callable[[ForwardBatch], None],
    ) -> torch.Tensor:
        """Draft every row: one drafter forward, one argmax per row.

        Args:
            batch: of the target, its `input_ids` `[bonus, mask x (W - 1)]` of every request, where the drafts are
                written.
            kv_lens: as in `draft_batch`.
            attn_backend: of the drafter, for blocks of W rows.
            lay_out: prepares it for a batch.

        Returns:
            [bs, W] int64, the bonus token and the draft tokens, in the memory of `input_ids`.
        """
        draft_batch = self.draft_batch(batch, kv_lens)
        plan, translator = batch.kv_loc_plan, self.draft_runner.kv_index_translator
        if self._window is not None:
            draft_batch.seq_lens = self._window.fill(batch.req_pool_indices, batch.seq_lens)
            plan = plan.reads_from(
                translator,
                seq_lens=draft_batch.seq_lens,
                seq_lens_cpu=draft_batch.seq_lens_cpu,
                read_extent=batch.spec_info.draft_token_num,
            )
        plan.bind(draft_batch, translator)
        lay_out(draft_batch)
        with forward_context(ForwardContext(attn_backend=attn_backend), forward_batch=draft_batch):
            output = self._model.forward(batch.input_ids, batch.positions, draft_batch)
        rows = batch.input_ids.view(-1, batch.spec_info.draft_token_num)
        return rows.copy_(self._head(rows, output.hidden_states))

    def accept_plain(
        self, batch: ForwardBatch, output: LogitsProcessorOutput, block: Block, in_shards: bool
    ) -> Acceptance:
        """Accept what the target's tokens agree with: the argmax of its untouched logits, and of sampled requests a
        draw from their distribution.

        Args:
            block: of the same requests; its `parameters` and `seed` are read.
            in_shards: whether the logits are this rank's own; then all requests are greedy.
        """
        if in_shards:
            tokens = self.logits.argmax(output.next_token_logits)
        else:
            maxima, tokens = ops.row_max(output.next_token_logits)
            ops.sample_rows(output.next_token_logits, maxima, tokens, block.parameters, block.seed)
        return self.accept(batch, tokens)

    def accept(self, batch: ForwardBatch, target_tokens: torch.Tensor) -> Acceptance:
        """Accept a prefix of the block.

        Args:
            target_tokens: [bs * W] int64, the target's choice after every row.
        """
        rows = batch.input_ids.view(-1, batch.spec_info.draft_token_num)
        accepted = ops.accept_prefix(rows, target_tokens.view_as(rows), batch.seq_lens)
        if self._simulated is not None:
            accepted = self._simulated(accepted, rows, batch.seq_lens)
        return accepted

    def append(self, batch: ForwardBatch, output: LogitsProcessorOutput, accepted: Acceptance) -> None:
        """Append the committed rows to the drafter's context. Rejected rows never enter it."""
        features, _ = self.split_hidden_states(output)
        slots = batch.kv_loc_plan.write_ids(self.draft_runner.kv_index_translator)
        self._context.write(features, batch.positions, slots, accepted.accept_lens)

    def append_prompt(self, output: LogitsProcessorOutput, positions: torch.Tensor, plan: KVLocPlan) -> None:
        """Append prompt tokens to the drafter's context: positions [T], in the slots that `plan` gives them."""
        features, _ = self.split_hidden_states(output)
        self._context.write(features, positions, plan.write_ids(self.draft_runner.kv_index_translator))

    def split_hidden_states(self, output: LogitsProcessorOutput) -> tuple[torch.Tensor, torch.Tensor]:
        """The drafter's features, [T, F * H], and what is captured behind them, [T, H] or [T, 0]."""
        num_features = self._model.num_features
        return output.hidden_states[:, :num_features], output.hidden_states[:, num_features:]
