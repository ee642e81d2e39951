"""What SGLang must know of DFLASH where it sizes and fills its pools: captured layers, drafter KV, room for blocks."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.model_executor.pool_configurator import (
    DefaultPoolConfigurator,
    HybridSWAPoolConfigurator,
    MemoryPoolConfig,
    SWAChunkCapPoolConfigurator,
)
from sglang.srt.runtime_context import get_parallel

from sglang_dflash.arguments import is_dflash, load_drafter_config
from sglang_dflash.config import ConfigError
from sglang_dflash.drafter_runner import draft_kv_dtype

# How SGLang sizes the pools of the targets that DFLASH can serve: a number of bytes per token, `_cell_size`.
_DEFAULT = (DefaultPoolConfigurator,)
_WINDOWED = (HybridSWAPoolConfigurator, SWAChunkCapPoolConfigurator)


def resolve_target_capture(original, *, config, server_args, model_config, spec_algorithm, is_draft_worker) -> None:
    """AROUND `spec_aux_hidden_state._resolve_dflash_aux_hidden_state`.

    Fills `config` (`SpecAuxHiddenStateConfig`) of the target's model runner with the layers to capture. It leaves
    `dflash_draft_num_layers` out, so that SGLang does not guess the drafter's KV from its number of layers; see
    :func:`count_drafter_kv`.
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
    drafter = load_drafter_config(server_args)
    config.dflash_use_aux_hidden_state = True
    config.dflash_target_layer_ids = list(drafter.target_layer_ids)


def count_drafter_kv(result, kvc):
    """AFTER `pool_configurator.create_memory_pool_configurator`: the target's pool leaves room for the drafter's.

    The drafter's pool has a slot for every token of the target's, in bytes of its own: with every token that SGLang
    makes room for it makes room for :meth:`DFlashConfig.kv_bytes_per_token` more.

    Args:
        result: the configurator of the pool of `kvc`; changed in place.
        kvc: `KVCacheConfigurator` of the target or the drafter, whose pool takes the target's size.

    Raises:
        ConfigError: SGLang sizes the target's pool in a way that is not known here.
    """
    if not kvc.spec_algorithm.is_dflash() or kvc.is_draft_worker:
        return result
    if type(result) not in _DEFAULT + _WINDOWED:
        raise ConfigError(
            f"the target {kvc.server_args.model_path} keeps its KV in pools that DFLASH cannot share a memory budget "
            f"with ({type(result).__name__})."
        )
    drafter = load_drafter_config(kvc.server_args)
    dtype = draft_kv_dtype(kvc.server_args, kvc.model_dtype)
    num_bytes = drafter.kv_bytes_per_token(dtype.itemsize, get_parallel().attn_tp_size)
    result._cell_size += num_bytes
    if type(result) in _WINDOWED:
        # `SWAChunkCapPoolConfigurator` reads no `_cell_size`; it counts the drafter in full layers of the target.
        result._draft_full_layers_num = Fraction(num_bytes, result._full_per_token)
    return result


@dataclass(frozen=True)
class KVMemory:
    """What a token costs in the pools as they are allocated, for the log and `/server_info`.

    Attributes:
        capacity: tokens that the target's full-attention layers have room for.
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


def req_to_token_headroom(original, server_args) -> int:
    """AROUND `allocation_sizing.get_req_to_token_extra_context_len`, in entries of a `req_to_token` row.

    A decode step reserves `get_alloc_reserve_per_decode` slots past the committed length, whatever the page size.
    """
    extra = original(server_args)
    if not is_dflash(server_args):
        return extra
    return max(extra, get_alloc_reserve_per_decode(server_args) + server_args.page_size)


def leave_room_for_blocks(result, scheduler, req) -> None:
    """AFTER `Scheduler.init_req_max_new_tokens`, which ends a request before it outgrows the KV pool.

    A decode step needs room for `get_alloc_reserve_per_decode` slots past the committed length. SGLang fails the last
    request of a batch for which there is none, so a request has to end before; its first token needs no decode step.
    """
    if not scheduler.spec_algorithm.is_dflash():
        return
    pool_size = scheduler.max_total_num_tokens // scheduler.page_size * scheduler.page_size
    room = pool_size - get_alloc_reserve_per_decode(scheduler.server_args) - len(req.origin_input_ids)
    req.sampling_params.max_new_tokens = min(req.sampling_params.max_new_tokens, max(room, 1))
