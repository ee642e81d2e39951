"""What the GPU does in a decode cycle, step by step: recorded in a CUDA graph, or run as it is.

Shapes: bs requests, B rows of a block, of which the first W are verified.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import nn

from sglang_dflash import ops
from sglang_dflash.accept import Acceptance
from sglang_dflash.context import ContextWriter
from sglang_dflash.draft_head import DraftHead
from sglang_dflash.draft_window import DraftWindow
from sglang_dflash.info import DFlashVerifyInput
from sglang_dflash.reference.prepare_block import Block
from sglang_dflash.simulate import SimulatedAcceptance
from sglang_dflash.verify_logits import VerifyLogits


class DecodeCycle:
    """The steps around the target's forward. From the draft on, a TARGET_VERIFY batch travels between them: the first W
    rows of every block, which its `spec_info` knows as `draft_token_num`."""

    def __init__(
        self, draft_runner: ModelRunner, target_model: nn.Module, block_size: int, window: DraftWindow | None
    ) -> None:
        self.block_size = block_size
        self._draft_runner = draft_runner
        self._model = draft_runner.model
        self._window = window
        self._head = DraftHead.of(self._model, target_model.lm_head, get_tp_group())
        self.logits = VerifyLogits(target_model, get_tp_group())
        self._context = ContextWriter(self._model, draft_runner.token_to_kv_pool)
        self._num_target_layers = target_model.config.num_hidden_layers
        self._simulated = SimulatedAcceptance.from_environment(draft_runner.device)
        # Drafter blocks differ from target ones only in who verifies them; one shape-only object serves all cycles.
        self._spec_info = DFlashVerifyInput(
            draft_token=None,
            positions=None,
            draft_token_num=block_size,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )

    @property
    def draft_backend(self) -> AttentionBackend:
        return self._draft_runner.attn_backend

    def num_row_layers(self, bs: int, width: int) -> int:
        """What a cycle computes, in rows times layers: a measure of its time where no GPU waits for memory."""
        return bs * (self.block_size * len(self._model.layers) + width * self._num_target_layers)

    def reload_weights(self) -> None:
        """The drafter's weights have changed."""
        self._context.fuse_weights()

    def begin(self) -> None:
        """On the host, before every cycle."""
        if self._simulated is not None:
            self._simulated.draw(self.block_size)

    def draft_batch(self, batch: ForwardBatch, block: Block, kv_lens: torch.Tensor) -> ForwardBatch:
        """The drafter's batch of whole blocks; its `seq_lens` are still the target's.

        Args:
            batch: of the target, and of the same requests as `block`.
            kv_lens: [bs] on the CPU, for planning: lengths with the whole block, or upper bounds of them.
        """
        if self._window is not None:
            kv_lens = self._window.host_kv_lens(kv_lens)
        return replace(
            batch,
            input_ids=block.input_ids,
            positions=block.positions,
            out_cache_loc=block.out_cache_loc,
            spec_info=self._spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            seq_lens_cpu=kv_lens,
            seq_lens_sum=int(kv_lens.sum()),
        )

    def draft(
        self, batch: ForwardBatch, block: Block, kv_lens: torch.Tensor, lay_out: Callable[[ForwardBatch], None]
    ) -> torch.Tensor:
        """Draft the rows that the target verifies: one drafter forward, one argmax per row.

        Args:
            batch: of the target; its `input_ids` are written, and may be those of `block`.
            block: `[bonus, mask x (B - 1)]` of the same requests.
            kv_lens: as in `draft_batch`.
            lay_out: prepares the drafter's attention backend for a batch.

        Returns:
            [bs, W] int64, the bonus token and the draft tokens, in the memory of `input_ids`.
        """
        draft_batch = self.draft_batch(batch, block, kv_lens)
        if self._window is not None:
            draft_batch.seq_lens = self._window.fill(batch.req_pool_indices, batch.seq_lens)
        lay_out(draft_batch)
        with forward_context(ForwardContext(attn_backend=self.draft_backend)):
            output = self._model.forward(block.input_ids, block.positions, draft_batch)
        rows = batch.input_ids.view(-1, batch.spec_info.draft_token_num)
        return rows.copy_(self._head(block.input_ids.view(-1, self.block_size), output.hidden_states, rows.shape[1]))

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
        self._context.write(features, batch.positions, batch.out_cache_loc, accepted.accept_lens)

    def append_prompt(
        self, output: LogitsProcessorOutput, positions: torch.Tensor, out_cache_loc: torch.Tensor
    ) -> None:
        """Append prompt tokens to the drafter's context: positions [T], out_cache_loc [T]."""
        features, _ = self.split_hidden_states(output)
        self._context.write(features, positions, out_cache_loc)

    def split_hidden_states(self, output: LogitsProcessorOutput) -> tuple[torch.Tensor, torch.Tensor]:
        """The drafter's features, [T, F * H], and what is captured behind them, [T, H] or [T, 0]."""
        num_features = self._model.num_features
        return output.hidden_states[:, :num_features], output.hidden_states[:, num_features:]
