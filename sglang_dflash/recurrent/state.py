"""States of running requests, advanced by what is accepted of each block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import mamba_track_grid
from sglang.srt.utils.common import async_h2d

from sglang_dflash import ops
from sglang_dflash.recurrent.arguments import check_state_dtype, check_track_interval
from sglang_dflash.recurrent.pool import inputs_of
from sglang_dflash.recurrent.verify import Chain
from sglang_dflash.types import States, StateSlots


class RecurrentState:
    """The recurrent states of a target's running requests."""

    def __init__(self, pool: HybridReqToTokenPool, interval: int) -> None:
        """
        Args:
            pool: maps requests to slots of states.
            interval: tokens between two states that are kept for the prefix cache.
        """
        cache = pool.mamba_pool.mamba_cache
        self._pool, self._interval = pool, interval
        self._states = States(cache.conv[0], cache.temporal)
        self._inputs = inputs_of(cache)
        # Before graphs are captured, which hold its address.
        Chain.on(cache.temporal.device)
        # The pool writes both mappings when a request gets its slots.
        current = pool.req_index_to_mamba_index_mapping
        kept = pool.req_index_to_mamba_ping_pong_track_buffer_mapping if pool.enable_mamba_extra_buffer else None
        self._slots = StateSlots(current, kept, torch.zeros_like(current))
        self._always = torch.ones(1, dtype=torch.int64, device=current.device)

    @classmethod
    def of(cls, target_runner: ModelRunner, block_size: int) -> RecurrentState | None:
        """Return the states of a target whose pools are allocated; None without recurrent layers.

        Raises:
            ConfigError: the states' dtype or the interval does not fit blocks of this size.
        """
        pool = target_runner.req_to_token_pool
        if not isinstance(pool, HybridReqToTokenPool):
            return None
        check_state_dtype(pool.mamba_pool.mamba_cache.temporal.dtype)
        interval = mamba_track_grid(target_runner.page_size)
        if pool.enable_mamba_extra_buffer:
            check_track_interval(interval, block_size)
        return cls(pool, interval)

    def describe(self) -> dict:
        """Return `recurrent_states` of `/server_info`."""
        pool = self._pool.mamba_pool
        states, num_rows = self._states, self._inputs.key.shape[1]
        return {
            "slots": pool.size,
            "bytes_per_slot": (states.conv.nbytes + states.temporal.nbytes) // (pool.size + 1),
            "verify_bytes_per_request": self._inputs.nbytes // num_rows,
            "running_requests": num_rows - 1,
            "track_interval": self._interval if self._pool.enable_mamba_extra_buffer else None,
        }

    def begin_prefill(self, batch: ScheduleBatch) -> None:
        """Record which track slot of each request takes the next state that the prefix cache keeps.

        A request's track slots alternate with every multiple of the interval that the request reaches. SGLang counts
        the multiples as the GPU does, once each. So the slot of every later multiple follows from the first one, also
        while the scheduler has not seen the last cycle.
        """
        if self._slots.kept is None:
            return
        next_boundaries = [
            (prefix_len + extend_len) // self._interval + 1
            for prefix_len, extend_len in zip(batch.prefix_lens, batch.extend_lens, strict=True)
        ]
        turns = [
            (req.kv.mamba_next_track_idx - boundary) % self._slots.kept.shape[1]
            for req, boundary in zip(batch.reqs, next_boundaries, strict=True)
        ]
        turn = self._slots.turn
        turn[batch.req_pool_indices] = async_h2d(turns, dtype=turn.dtype, device=turn.device)

    def commit(
        self,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        accept_lens: torch.Tensor,
        paths: torch.Tensor,
        is_due: torch.Tensor,
    ) -> None:
        """Advance the states of requests whose trees or chains have been verified. Call it once for each cycle.

        Args:
            req_pool_indices: [bs] int64.
            seq_lens: [bs] int64. Committed tokens before the root.
            accept_lens: [bs] int64. Accepted tokens, with the bonus token.
            paths: [bs, W] int64. Nodes of the accepted paths; nodes after the accepted ones do not matter.
            is_due: [1] int64. If it holds 0, nothing is done.
        """
        self.commit_to(self._slots, req_pool_indices, seq_lens, accept_lens, paths, is_due)

    def plan_commit(self, batch: ScheduleBatch, has_fallback: bool, is_overlapped: bool) -> PendingCommit | None:
        """Return the commit of a cycle that is about to be launched; None if the cycle commits by itself.

        Args:
            batch: of the cycle.
            has_fallback: whether SGLang's sampler chooses tokens after the cycle.
            is_overlapped: whether the scheduler launches the next cycle before it reads this one's result.
        """
        waits = self._slots.kept is None and not is_overlapped
        if not has_fallback and not waits:
            return None
        # When a graph has been replayed, the scheduler may give a finished request's row of `req_to_token` to another
        # request, with other slots.
        rows, slots = batch.req_pool_indices, self._slots
        kept = None if slots.kept is None else slots.kept[rows]
        copied = StateSlots(slots.current[rows], kept, slots.turn[rows])
        return PendingCommit(self, copied, batch.seq_lens.clone(), waits)

    def commit_to(
        self,
        slots: StateSlots,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        accept_lens: torch.Tensor,
        paths: torch.Tensor,
        is_due: torch.Tensor | None = None,
    ) -> None:
        """Advance states as `commit` does, with slots that are given.

        Args:
            slots: of requests.
            rows: [bs] int64. Rows of `slots`.
            seq_lens: [bs] int64.
            accept_lens: [bs] int64.
            paths: [bs, W] int64.
            is_due: [1] int64. None: always.
        """
        ops.commit_state(
            states=self._states,
            inputs=self._inputs,
            slots=slots,
            req_pool_indices=rows,
            seq_lens=seq_lens,
            accept_lens=accept_lens,
            interval=self._interval,
            paths=paths,
            is_due=self._always if is_due is None else is_due,
        )


@dataclass
class PendingCommit:
    """Commit of one cycle, after the cycle.

    It waits for the scheduler where the prefix cache keeps the state at the end of an answer, and no other. Such a
    state must not go further than an answer that ends inside a block. The scheduler reads the result before it launches
    the next cycle, which overwrites the inputs of this one's tokens.

    Attributes:
        states: of the target.
        slots: [bs]. Copies of the requests' slots.
        seq_lens: [bs] int64. Committed tokens before the block.
        waits: whether the scheduler runs it (`prefix_cache.commit_after_result`).
        accept_lens: [bs] int64. Tokens by which the states advance. None before `accept`.
        paths: [bs, W] int64. Nodes of the accepted paths. None before `accept`.
    """

    states: RecurrentState
    slots: StateSlots
    seq_lens: torch.Tensor
    waits: bool
    accept_lens: torch.Tensor | None = None
    paths: torch.Tensor | None = None

    @classmethod
    def of(cls, result: GenerationBatchResult) -> PendingCommit | None:
        """Return the commit that a result of the worker waits with, if any."""
        refs = result.extra_keep_alive_refs or ()
        return next((ref for ref in refs if isinstance(ref, cls) and ref.waits), None)

    def accept(self, accept_lens: torch.Tensor, paths: torch.Tensor) -> None:
        """Take what is accepted, and commit it unless the commit waits.

        Args:
            accept_lens: [bs] int64.
            paths: [bs, W] int64. It may be in memory that the next cycle overwrites.
        """
        self.accept_lens, self.paths = accept_lens.clone(), paths
        if not self.waits:
            self.run()

    def stop_at(self, i: int, num_tokens: int) -> None:
        """Advance the state of the i-th request by `num_tokens` of its block, which is not more than are accepted."""
        self.accept_lens[i] = num_tokens

    def run(self) -> None:
        rows = torch.arange(len(self.seq_lens), device=self.seq_lens.device)
        self.states.commit_to(self.slots, rows, self.seq_lens, self.accept_lens, self.paths)
