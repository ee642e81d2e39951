"""What SGLang must know of DFLASH where it sizes and fills its pools: captured layers, drafter KV, room for blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.configs.model_config import is_deepseek_v4
from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
from sglang.srt.runtime_context import get_schedule, get_spec

from sglang_dflash.arguments import load_drafter_config
from sglang_dflash.config import ConfigError
from sglang_dflash.drafter_runner import draft_model_config


def resolve_target_capture(original, *, config, server_args, model_config, spec_algorithm, is_draft_worker) -> None:
    """AROUND `spec_aux_hidden_state._resolve_dflash_aux_hidden_state`.

    Fills `config` (`SpecAuxHiddenStateConfig`) of the target's model runner with the layers to capture, and with the
    drafter whose KV SGLang makes room for in the target's memory budget (`draft_kv_budget`).

    Raises:
        ConfigError: SGLang sizes the target's pools without asking for a drafter's KV.
    """
    if not spec_algorithm.is_dflash():
        original(
            config=config,
            server_args=server_args,
            model_config=model_config,
            spec_algorithm=spec_algorithm,
            is_draft_worker=is_draft_worker,
        )
        return
    if is_draft_worker:
        return
    if is_deepseek_v4(model_config.hf_config):
        raise ConfigError(
            f"the target {model_config.model_path} keeps its KV in pools that DFLASH cannot share a memory budget with "
            "(DSV4PoolConfigurator)."
        )
    drafter = load_drafter_config(server_args)
    config.dflash_use_aux_hidden_state = True
    config.dflash_target_layer_ids = list(drafter.target_layer_ids)
    config.draft_model_config = draft_model_config(server_args, model_config.context_len, model_config.dtype)
    config.draft_kv_num_layers = config.dflash_draft_num_layers = len(drafter.layers)


@dataclass(frozen=True)
class KVMemory:
    """What a token costs in the pools as they are allocated, for the log and `/server_info`.

    Attributes:
        capacity: tokens that the target's full-attention layers have room for, before CUDA graphs take theirs.
        target_bytes_per_token, drafter_bytes_per_token: of one rank. A windowed target's include its share of the
            smaller pool of the sliding layers.
        drafter_dtype: of the drafter's keys and values.
    """

    capacity: int
    target_bytes_per_token: float
    drafter_bytes_per_token: float
    drafter_dtype: torch.dtype

    @classmethod
    def measure(cls, target: KVCache, drafter: KVCache) -> KVMemory:
        return cls(drafter.size, _bytes_per_token(target), _bytes_per_token(drafter), drafter.dtype)

    def __str__(self) -> str:
        return (
            f"KV memory per token: {self.target_bytes_per_token:.0f} bytes of the target, "
            f"{self.drafter_bytes_per_token:.0f} bytes of the drafter ({self.drafter_dtype}); "
            f"room for {self.capacity} tokens."
        )


def _bytes_per_token(pool: KVCache) -> float:
    sizes = pool.get_kv_size_bytes()
    # MLA pools hold one latent, the others keys and values.
    num_bytes = sum(sizes) if isinstance(sizes, tuple) else sizes
    # Pools have one page more than they give out: where padded rows write.
    return num_bytes / (pool.size + pool.page_size)


def check_window_pool(config: MemoryPoolConfig, window: int | None, page_size: int) -> None:
    """Raise :class:`ConfigError` if the pools of a windowed target cannot hold one request in decode.

    SGLang checks that the window fits; a decode step needs its block as well, and what waits for its eviction. Without
    any full layer, SGLang gives all slots of a token back, and with them the drafter's KV of it.

    Args:
        config: sizes of the target's pools.
        window: keys to the left of a query in the target's sliding layers; None without such layers.
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
    """Tokens that may leave a target's window before their slots are given back."""
    return max(1, envs.SGLANG_SWA_EVICTION_INTERVAL.get())


def req_to_token_headroom(original) -> int:
    """AROUND `allocation_sizing.get_req_to_token_extra_context_len`, in entries of a `req_to_token` row.

    A decode step reserves `get_alloc_reserve_per_decode` slots past the committed length, whatever the page size.
    """
    extra = original()
    if get_spec().speculative_algorithm != "DFLASH":
        return extra
    return max(extra, get_alloc_reserve_per_decode() + get_schedule().page_size)


def leave_room_for_blocks(result, scheduler, req) -> None:
    """AFTER `Scheduler.init_req_max_new_tokens`, which ends a request before it outgrows the KV pool.

    A decode step needs room for `get_alloc_reserve_per_decode` slots past the committed length. SGLang fails the last
    request of a batch for which there is none, so a request has to end before; its first token needs no decode step.
    """
    if not scheduler.spec_algorithm.is_dflash():
        return
    pool_size = scheduler.max_total_num_tokens // scheduler.page_size * scheduler.page_size
    room = max(pool_size - get_alloc_reserve_per_decode() - len(req.origin_input_ids), 1)
    params = req.sampling_params
    params.max_new_tokens = min(params.max_new_tokens, room)
    # Else EOS would be suppressed to the end.
    params.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)
