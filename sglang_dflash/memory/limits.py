"""Limits on tokens of a request: room for its blocks in the KV pools and in its row of `req_to_token`."""

from __future__ import annotations

from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
from sglang.srt.runtime_context import get_schedule
from sglang.srt.session.streaming_session import StreamingSession

from sglang_dflash.errors import ConfigError
from sglang_dflash.server_args.arguments import serves_dflash


def check_pool(config: MemoryPoolConfig, page_size: int) -> None:
    """Check that the target's pool has room for a prompt and a decode step.

    Otherwise `leave_room_for_blocks` would end every request with its first token.

    Raises:
        ConfigError: naming the pool's size, and what one step needs.
    """
    needed = get_alloc_reserve_per_decode() + page_size
    if config.max_total_num_tokens <= needed:
        raise ConfigError(
            f"the KV pool has room for {config.max_total_num_tokens} tokens, and one decode step of DFLASH reserves "
            f"{needed}; raise --max-total-tokens or --mem-fraction-static, or verify fewer tokens "
            "(--speculative-num-draft-tokens)."
        )


def check_window_pool(config: MemoryPoolConfig, window: int | None, page_size: int) -> None:
    """Check that the pools of a windowed target can hold one request in decode.

    SGLang checks that the window fits. A decode step also needs slots for its block, and for tokens that wait for their
    eviction. For a target without full layers, SGLang frees all slots of a token that leaves the window, and with them
    the drafter's KV.

    Args:
        config: sizes of the target's pools.
        window: keys to the left of a query in the target's sliding layers. None without such layers.

    Raises:
        ConfigError: naming the pool's size, and what one request needs.
    """
    if window is None or config.swa_max_total_num_tokens is None:
        return
    if config.full_max_total_num_tokens == 0:
        raise ConfigError(
            "the target has sliding-window layers only (no full_attention in layer_types): the slots of tokens that "
            "leave the window are given away, and the drafter's context with them."
        )
    needed = window + swa_eviction_interval() + get_alloc_reserve_per_decode() + 2 * page_size
    if config.swa_max_total_num_tokens < needed:
        raise ConfigError(
            f"the KV pool of the target's sliding layers has room for {config.swa_max_total_num_tokens} tokens, and "
            f"one request of DFLASH can need {needed} in it; raise --swa-full-tokens-ratio or --max-total-tokens, or "
            "lower SGLANG_SWA_EVICTION_INTERVAL."
        )


def swa_eviction_interval() -> int:
    """Return how many tokens may leave a target's window before their slots are freed."""
    return max(1, envs.SGLANG_SWA_EVICTION_INTERVAL.get())


def req_to_token_headroom(original) -> int:
    """AROUND `allocation_sizing.get_req_to_token_extra_context_len`: add room for a decode step to each row.

    A decode step reserves `get_alloc_reserve_per_decode` slots past the committed length, whatever the page size.
    """
    extra = original()
    if not serves_dflash():
        return extra
    return max(extra, get_alloc_reserve_per_decode() + get_schedule().page_size)


def leave_room_for_blocks(result, scheduler, req) -> None:
    """AFTER `Scheduler.init_req_max_new_tokens`: end a request before its next block outgrows the KV pool.

    A decode step needs `get_alloc_reserve_per_decode` slots past the committed length. SGLang fails the last request of
    a batch if they are missing, so the request must end before. Its first token needs no decode step.
    """
    if not scheduler.spec_algorithm.is_dflash():
        return
    pool_size = scheduler.max_total_num_tokens // scheduler.page_size * scheduler.page_size
    room = max(pool_size - get_alloc_reserve_per_decode() - len(req.origin_input_ids), 1)
    params = req.sampling_params
    params.max_new_tokens = min(params.max_new_tokens, room)
    # Otherwise EOS would be suppressed to the end.
    params.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)


def leave_last_token_out(kept: bool, sessions: StreamingSession, req: Req) -> None:
    """AFTER `StreamingSession.try_cache_finished_req`: leave the last token of a turn out of its KV.

    SGLang counts a KV slot for every token. The last token may have replaced a rejected draft, and the next cycle,
    which writes its KV, may not run. So the next turn computes it.
    """
    if kept and serves_dflash():
        kv = sessions.slots[req.session.session_id].kv
        kv.kv_committed_len = min(kv.kv_committed_len, len(req.origin_input_ids) + len(req.output_ids) - 1)
