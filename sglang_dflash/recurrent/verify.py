"""Verification of blocks in one recurrent layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.memory_pool import MambaPool

from sglang_dflash import ops

if TYPE_CHECKING:
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention


def verify_and_keep_inputs(
    backend: GDNAttnBackend,
    *,
    layer: RadixLinearAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    layer_cache: MambaPool.SpeculativeState,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    retrieve_parent_token: None,
) -> torch.Tensor:
    """REPLACE `GDNAttnBackend._replayssm_fold_target_verify`: apply the delta rule of one layer to verified blocks.

    Args:
        layer: gives `A_log` and `dt_bias`.
        query: [1, T, H, K].
        key: [1, T, H, K].
        value: [1, T, HV, V].
        a: [T, HV]. Input of the decay gate.
        b: [T, HV]. Input of the update gate.
        layer_cache: of this layer. The inputs of every token are written to it (`pool.allocate_states`).
        ssm_states: [slots, HV, V, K]. Read only.
        cache_indices: [n] int32. Slot of each request.
        query_start_loc: [n + 1]. Start of each block, and T. All blocks have the same length.
        retrieve_parent_token: unused.

    Returns:
        [1, T, HV, V]
    """
    blocks = (len(query_start_loc) - 1, -1)
    output = ops.verify_block(
        *(x[0].unflatten(0, blocks) for x in (query, key, value)),
        *(x.unflatten(0, blocks) for x in (a, b)),
        a_log=layer.A_log,
        dt_bias=layer.dt_bias,
        states=ssm_states,
        slots=cache_indices,
        key_out=layer_cache.replayssm_rawk,
        change_out=layer_cache.replayssm_rawv,
        log_decay_out=layer_cache.replayssm_g,
    )
    return output.flatten(0, 1)[None]
