"""Memory of a target's recurrent states: what SGLang's pool holds for them, and what SGLang reserves."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import MambaPool
from sglang.srt.runtime_context import get_schedule, get_spec

from sglang_dflash.types import BlockInputs


def allocate_inputs(pool: MambaPool, num_rows: int, num_nodes: int, num_key_heads: int) -> BlockInputs:
    """Allocate the inputs of the recurrent layers for every token that a cycle verifies.

    Args:
        num_rows: running requests, and one for padding.
        num_nodes: N, tokens that are verified for a request.
        num_key_heads: H, of this rank.
    """
    conv, temporal = pool.mamba_cache.conv[0], pool.mamba_cache.temporal
    num_layers, _, num_value_heads, value_size, key_size = temporal.shape

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        # A value that is read before it is written must not look like a number.
        return torch.full((num_layers, num_rows, num_nodes, *shape), torch.nan, dtype=dtype, device=conv.device)

    return BlockInputs(
        conv=empty(conv.shape[2], dtype=conv.dtype),
        key=empty(num_key_heads, key_size, dtype=conv.dtype),
        change=empty(num_value_heads, value_size, dtype=torch.float32),
        log_decay=empty(num_value_heads, dtype=torch.float32),
    )


def inputs_of(cache: MambaPool.SpeculativeState) -> BlockInputs:
    """Return what :func:`allocate_states` stored in the cache of a pool, or of one of its layers."""
    return BlockInputs(
        conv=cache.intermediate_conv_window[0],
        key=cache.replayssm_rawk,
        change=cache.replayssm_rawv,
        log_decay=cache.replayssm_g,
    )


def input_bytes_per_request(cache_params, num_nodes: int) -> int:
    """Return the bytes of one request in :func:`allocate_inputs`, before anything is allocated.

    Args:
        cache_params: `Mamba2CacheParams` of the target's config.
        num_nodes: N.
    """
    shape, dtype = cache_params.shape, cache_params.dtype
    num_value_heads, value_size, key_size = shape.temporal
    channels = shape.conv[0][0]
    per_token = (channels + shape.num_k_heads_per_tp * key_size) * dtype.conv.itemsize
    per_token += num_value_heads * (value_size + 1) * torch.float32.itemsize
    return len(cache_params.layers) * num_nodes * per_token


def comparison_bytes_per_request(cache_params, num_nodes: int) -> int:
    """Return the bytes that `ops.kernels.verify_block` takes while it compares the nodes of one request.

    Args:
        cache_params: `Mamba2CacheParams` of the target's config.
        num_nodes: N.
    """
    num_value_heads = cache_params.shape.temporal[0]
    width = max(16, 1 << (num_nodes - 1).bit_length())
    # Two matrices and three factors of each head.
    return num_value_heads * width * (2 * width + 3) * torch.float32.itemsize


def allocate_states(original, pool: MambaPool, **kwargs) -> None:
    """AROUND `MambaPool.__init__`: allocate the inputs of verified tokens in place of the state after each of them.

    The inputs are stored in fields that SGLang has for another algorithm whose verification keeps inputs too
    (ReplaySSM).
    """
    num_nodes = kwargs.get("speculative_num_draft_tokens")
    if num_nodes is None or get_spec().speculative_algorithm != "DFLASH":
        original(pool, **kwargs)
        return
    original(pool, **kwargs | {"speculative_num_draft_tokens": None})
    cache_params = kwargs["cache_params"]
    # One row for each running request, and one for padding.
    num_rows = kwargs["spec_state_size"] + 1
    inputs = allocate_inputs(pool, num_rows, num_nodes, num_key_heads=cache_params.shape.num_k_heads_per_tp)
    states = pool.mamba_cache
    pool.mamba_cache = MambaPool.SpeculativeState(
        conv=states.conv,
        temporal=states.temporal,
        intermediate_ssm=None,
        intermediate_conv_window=[inputs.conv],
        replayssm_rawk=inputs.key,
        replayssm_rawv=inputs.change,
        replayssm_g=inputs.log_decay,
    )
    pool.mem_usage += inputs.nbytes / 2**30


def leave_memory_for_inputs(original, configurator: KVCacheConfigurator, total_rest_memory: float) -> float:
    """AROUND `KVCacheConfigurator._handle_max_mamba_cache`: reserve the inputs of verified tokens.

    SGLang would reserve the state after every verified token.

    Args:
        total_rest_memory: GiB for states and KV.

    Returns:
        GiB that are left to KV.
    """
    if not configurator.spec_algorithm.is_dflash() or configurator.is_draft_worker:
        return original(configurator, total_rest_memory)
    algorithm = configurator.spec_algorithm
    # Without an algorithm, SGLang reserves the states alone.
    configurator.spec_algorithm = type(algorithm).NONE
    try:
        rest = original(configurator, total_rest_memory)
    finally:
        configurator.spec_algorithm = algorithm
    per_request = input_bytes_per_request(
        configurator.mambaish_config.mamba2_cache_params, get_spec().speculative_num_draft_tokens
    )
    slots_per_request = configurator._calculate_mamba_ratio()
    num_requests = min(get_schedule().max_running_requests, get_schedule().max_mamba_cache_size // slots_per_request)
    return rest - per_request * (num_requests + 1) / 2**30
