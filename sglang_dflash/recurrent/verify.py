"""Verification of trees or chains in one recurrent layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_spec

from sglang_dflash import ops
from sglang_dflash.checkpoint.config import MAX_NODES
from sglang_dflash.recurrent.pool import inputs_of

if TYPE_CHECKING:
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention


@dataclass(frozen=True)
class Chain:
    """A chain of `MAX_NODES` nodes, as :class:`sglang_dflash.types.Trees` describes it. A shorter chain is its
    beginning.

    Attributes:
        parents: [1, MAX_NODES] int64.
        ancestors: [1, MAX_NODES] int64.
    """

    parents: torch.Tensor
    ancestors: torch.Tensor

    @classmethod
    @cache
    def on(cls, device: torch.device) -> Chain:
        """Return the chain on a device. CUDA graphs hold its address, so it has to exist before they are captured."""
        nodes = torch.arange(MAX_NODES, device=device)[None]
        return cls(nodes - 1, (1 << nodes).cumsum(1))


def verify_nodes(
    original,
    backend: GDNAttnBackend,
    *,
    layer: RadixLinearAttention,
    forward_batch: ForwardBatch,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    **kwargs,
) -> torch.Tensor:
    """AROUND `GDNAttnBackend.forward_extend`: verify trees or chains without a state per node.

    The states of the requests are read and not written. The inputs of every node are stored in the pool
    (`pool.allocate_states`).

    Args:
        layer: the layer's weights and sizes.
        forward_batch: of n requests, N nodes each. Without `spec_info.trees` they are chains.
        mixed_qkv: [n * N, C]. Queries, keys and values before the convolution.
        a: [n * N, HV]. Input of the decay gate.
        b: [n * N, HV]. Input of the update gate.

    Returns:
        [1, n * N, HV, V].
    """
    if not forward_batch.forward_mode.is_target_verify() or get_spec().speculative_algorithm != "DFLASH":
        return original(backend, layer=layer, forward_batch=forward_batch, mixed_qkv=mixed_qkv, a=a, b=b, **kwargs)
    n, trees = forward_batch.batch_size, forward_batch.spec_info.trees
    num_nodes = mixed_qkv.shape[0] // n
    if trees is None:
        chain = Chain.on(mixed_qkv.device)
        parents, ancestors = (x[:, :num_nodes].expand(n, -1) for x in (chain.parents, chain.ancestors))
    else:
        parents, ancestors = trees.parents, trees.ancestors
    cache = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    inputs, slots = inputs_of(cache), backend.forward_metadata.mamba_cache_indices
    convolved = ops.convolve_nodes(
        mixed_qkv.unflatten(0, (n, num_nodes)),
        cache.conv[0],
        slots,
        parents,
        layer.conv_weights,
        layer.bias,
        inputs.conv,
    )
    query, key, value = convolved.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=2)
    output = ops.verify_block(
        query.unflatten(2, (layer.num_q_heads, layer.head_q_dim)),
        key.unflatten(2, (layer.num_k_heads, layer.head_k_dim)),
        value.unflatten(2, (layer.num_v_heads, layer.head_v_dim)),
        *(x.unflatten(0, (n, num_nodes)) for x in (a, b)),
        a_log=layer.A_log,
        dt_bias=layer.dt_bias,
        states=cache.temporal,
        slots=slots,
        ancestors=ancestors,
        key_out=inputs.key,
        change_out=inputs.change,
        log_decay_out=inputs.log_decay,
    )
    return output.flatten(0, 1)[None]
