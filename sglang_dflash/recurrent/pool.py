"""Memory of a target's recurrent states: what SGLang's pool holds for them, and what SGLang reserves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import MambaPool
from sglang.srt.runtime_context import get_schedule, get_spec

from sglang_dflash.types import BlockInputs


@dataclass(frozen=True)
class VerifiedInputs:
    """Inputs of the recurrent layers for every token that a cycle verifies, of all running requests.

    Attributes:
        conv_memory: [L, running requests + 1, W + S, C]. Memory of `inputs.conv`. Consecutive states of a convolution
            share all inputs but one, so that a block of W tokens needs W + S inputs.
        inputs: [L, running requests + 1, W, ...], see :class:`BlockInputs`.
    """

    conv_memory: torch.Tensor
    inputs: BlockInputs

    @classmethod
    def allocate(cls, pool: MambaPool, num_rows: int, block_size: int, num_key_heads: int) -> VerifiedInputs:
        conv, temporal = pool.mamba_cache.conv[0], pool.mamba_cache.temporal
        num_layers, _, num_value_heads, value_size, key_size = temporal.shape
        channels, length = conv.shape[2:]

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            # A value that is read before it is written must not look like a number.
            return torch.full((num_layers, num_rows, *shape), torch.nan, dtype=dtype, device=conv.device)

        # The channels of one token are contiguous, as the convolution writes them.
        conv_memory = empty(block_size + length - 1, channels, dtype=conv.dtype)
        inputs = BlockInputs(
            conv=conv_memory.unfold(2, length, 1),
            key=empty(block_size, num_key_heads, key_size, dtype=conv.dtype),
            change=empty(block_size, num_value_heads, value_size, dtype=torch.float32),
            log_decay=empty(block_size, num_value_heads, dtype=torch.float32),
        )
        return cls(conv_memory, inputs)

    @classmethod
    def of(cls, pool: MambaPool) -> VerifiedInputs:
        """Return what :func:`allocate_states` stored in a pool."""
        cache = pool.mamba_cache
        inputs = BlockInputs(
            conv=cache.intermediate_conv_window[0],
            key=cache.replayssm_rawk,
            change=cache.replayssm_rawv,
            log_decay=cache.replayssm_g,
        )
        return cls(pool._intermediate_conv_window_phys[0], inputs)

    @property
    def nbytes(self) -> int:
        rest = (self.inputs.key, self.inputs.change, self.inputs.log_decay)
        return self.conv_memory.nbytes + sum(tensor.nbytes for tensor in rest)


def input_bytes_per_request(cache_params, block_size: int) -> int:
    """Return the bytes of one request in :class:`VerifiedInputs`, before anything is allocated.

    Args:
        cache_params: `Mamba2CacheParams` of the target's config.
        block_size: W.
    """
    shape, dtype = cache_params.shape, cache_params.dtype
    num_value_heads, value_size, key_size = shape.temporal
    (channels, length), heads = shape.conv[0], shape.num_k_heads_per_tp
    per_layer = channels * (length + block_size - 1) * dtype.conv.itemsize
    per_layer += block_size * heads * key_size * dtype.conv.itemsize
    per_layer += block_size * num_value_heads * (value_size + 1) * torch.float32.itemsize
    return len(cache_params.layers) * per_layer


def allocate_states(original, pool: MambaPool, **kwargs) -> None:
    """AROUND `MambaPool.__init__`: allocate the inputs of verified tokens in place of the state after each of them.

    The inputs are stored in fields that SGLang has for another algorithm whose verification keeps inputs too
    (`replayssm_spec_fold`).
    """
    block_size = kwargs.get("speculative_num_draft_tokens")
    if block_size is None or get_spec().speculative_algorithm != "DFLASH":
        original(pool, **kwargs)
        return
    original(pool, **kwargs | {"speculative_num_draft_tokens": None})
    cache_params = kwargs["cache_params"]
    # One entry for each running request, and one for padding.
    verified = VerifiedInputs.allocate(
        pool, kwargs["spec_state_size"] + 1, block_size, num_key_heads=cache_params.shape.num_k_heads_per_tp
    )
    states, inputs = pool.mamba_cache, verified.inputs
    pool.mamba_cache = MambaPool.SpeculativeState(
        conv=states.conv,
        temporal=states.temporal,
        intermediate_ssm=None,
        intermediate_conv_window=[inputs.conv],
        replayssm_rawk=inputs.key,
        replayssm_rawv=inputs.change,
        replayssm_g=inputs.log_decay,
    )
    pool._intermediate_conv_window_phys = [verified.conv_memory]
    pool.replayssm_spec_fold = True
    pool.mem_usage += verified.nbytes / 2**30


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
