"""The target's attention of drafted trees, for every attention backend, and of chains instead of FlashInfer's.

SGLang's backends verify a block as a chain. In a tree a node sees its ancestors, and its position is its depth. One
kernel does that for all backends (`ops.attend_trees`), because it finds keys by their slots. A chain is a tree in which
each node is the parent of the next.

Shapes: bs requests, N nodes of each, T = bs * N.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, KVCache, KVWriteLoc, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_spec
from torch import nn

from sglang_dflash import ops
from sglang_dflash.errors import ConfigError
from sglang_dflash.types import KeyChunks, KVRows


class NodeAttentionBackend(AttentionBackend):
    """An attention backend that replaces the target's while it verifies nodes.

    Attributes:
        req_to_token: [rows, width] int32. The target's table of KV slots.
        req_to_token_pool, token_to_kv_pool, kv_index_translator: the target's. Its layers read them here.
        forward_metadata: [bs * N] int64. Slots of the nodes in the KV pool of sliding layers; None without such a pool.
    """

    def __init__(self, target_runner: ModelRunner) -> None:
        super().__init__()
        self.kv_index_translator = target_runner.kv_index_translator
        self.forward_metadata: torch.Tensor | None = None
        # Of the current forward, by window and shape of its layers.
        self._splits: dict[tuple, KeyChunks | None] = {}
        self.token_to_kv_pool = target_runner.token_to_kv_pool
        self._swa_pool = self.token_to_kv_pool if isinstance(self.token_to_kv_pool, SWAKVPool) else None
        self.req_to_token_pool = target_runner.req_to_token_pool
        self.req_to_token = self.req_to_token_pool.req_to_token

    def _ancestors(self, forward_batch: ForwardBatch) -> torch.Tensor:
        """Return the ancestors of the nodes, [bs, N] int64, as in :class:`sglang_dflash.types.Trees`."""
        raise NotImplementedError

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        self._splits.clear()
        if self._swa_pool is not None:
            self.forward_metadata = self._swa_pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention of all nodes.

        Args:
            q: [T, heads * head_dim]. With `q_rope`, the part without RoPE.
            k, v: [T, KV heads, head_dim]; None: the pool has them. Latent attention has the latent as `k`, and ignores
                `v`.
            q_rope: [T, heads, rope_dim] or [T, heads * rope_dim], for latent attention.
            k_rope: [T, 1, rope_dim], for latent attention.
            sinks: [heads]. One logit for each head.

        Returns:
            [T, heads * v_head_dim], in the dtype of `q`.
        """
        ancestors, heads = self._ancestors(forward_batch), layer.tp_q_head_num
        if save_kv_cache and k is not None:
            slots = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=self.forward_metadata)
            if k_rope is not None:
                self.token_to_kv_pool.set_mla_kv_buffer(layer, slots.loc, k, k_rope)
            elif layer.k_scale is None:
                self.token_to_kv_pool.set_kv_buffer(layer, slots, k, v)
            elif isinstance(self.token_to_kv_pool, MLATokenToKVPool):
                # This pool takes no scales.
                self.token_to_kv_pool.set_kv_buffer(layer, slots, k / layer.k_scale, v)
            else:
                self.token_to_kv_pool.set_kv_buffer(layer, slots, k, v, layer.k_scale, layer.v_scale)
        query = q.view(-1, heads, layer.head_dim) if q_rope is None else _join(q, q_rope, heads)
        k_cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        v_cache = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        is_scaled = k_cache.dtype != q.dtype and layer.k_scale is not None
        window = layer.sliding_window_size if layer.sliding_window_size > -1 else None
        output = ops.attend_trees(
            query,
            k_cache,
            v_cache,
            self.req_to_token,
            forward_batch.req_pool_indices,
            self._slot_map(layer),
            forward_batch.seq_lens,
            forward_batch.positions,
            ancestors,
            layer.scaling,
            window,
            layer.logit_cap,
            sinks,
            layer.k_scale_float if is_scaled else 1.0,
            layer.v_scale_float if is_scaled else 1.0,
            self._split(
                forward_batch,
                window,
                ancestors.shape[1],
                heads,
                *k_cache.shape[1:],
                v_cache.shape[2],
                query.dtype,
            ),
        )
        return output.view(-1, heads * layer.v_head_dim)

    def _split(self, forward_batch: ForwardBatch, *shape: int | torch.dtype | None) -> KeyChunks | None:
        """Return the division of the keys, made once per forward for all layers of the same window and shape."""
        if shape not in self._splits:
            self._splits[shape] = ops.split_trees(forward_batch.seq_lens, forward_batch.req_pool_indices, *shape)
        return self._splits[shape]

    def _slot_map(self, layer: RadixAttention) -> torch.Tensor | None:
        if self._swa_pool is None or not self._swa_pool.layers_mapping[layer.layer_id][1]:
            return None
        return self._swa_pool.full_to_swa_index_mapping


class TreeAttentionBackend(NodeAttentionBackend):
    """Attention of trees (`DFlashVerifyInput.trees`)."""

    def __init__(self, target_runner: ModelRunner) -> None:
        """
        Raises:
            ConfigError: this target's trees cannot be verified; names the reason.
        """
        obstacle = tree_obstacle(target_runner)
        if obstacle is not None:
            raise ConfigError(f"--speculative-eagle-topk: {obstacle}; leave the flag out.")
        super().__init__(target_runner)
        self._runner = target_runner
        self._rows = kv_rows(self.token_to_kv_pool)

    def of_target(self) -> AttentionBackend:
        """Return a backend for all layers of the target, for one number of nodes.

        Recurrent layers get a backend of their own: its buffers for graphs have a size. This one has no such buffers.
        """
        backend = self._runner.attn_backend
        if not isinstance(backend, HybridLinearAttnBackend):
            return self
        recurrent = type(backend.linear_attn_backend)(self._runner)
        return HybridLinearAttnBackend(self, recurrent, backend.full_attn_layers)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate nothing: this backend reads tensors of the batch only."""

    def _ancestors(self, forward_batch: ForwardBatch) -> torch.Tensor:
        return forward_batch.spec_info.trees.ancestors

    def move_kv(self, slots: torch.Tensor, paths: torch.Tensor, accept_lens: torch.Tensor) -> None:
        """Move the KV of accepted paths in all layers to the slots that a chain has; see `ops.reference.move_kv`."""
        for rows, has_own_slots in self._rows:
            slot_map = self._swa_pool.full_to_swa_index_mapping if has_own_slots else None
            ops.move_kv(rows, slots, paths, accept_lens, slot_map)


class ChainAttentionBackend(NodeAttentionBackend):
    """Attention of chains in graphs (`attention.plan.chain_attention`)."""

    def __init__(self, target_runner: ModelRunner) -> None:
        super().__init__(target_runner)
        # By N: ancestors of the largest batch.
        self._chains: dict[int, torch.Tensor] = {}

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        num_nodes = max_num_tokens // max_bs
        bits = 1 << torch.arange(num_nodes, device=self.req_to_token.device)
        self._chains[num_nodes] = bits.cumsum(0).repeat(max_bs, 1)

    def _ancestors(self, forward_batch: ForwardBatch) -> torch.Tensor:
        return self._chains[forward_batch.spec_info.draft_token_num][: forward_batch.batch_size]


def _join(nope: torch.Tensor, rope: torch.Tensor, heads: int) -> torch.Tensor:
    return torch.cat([part.view(part.shape[0], heads, -1) for part in (nope, rope)], dim=-1)


def tree_obstacle(target_runner: ModelRunner) -> str | None:
    """Return why the trees of a target, which has its KV pools, cannot be verified, in words; None: they can."""
    obstacle = layer_obstacle(target_runner.model)
    if obstacle is not None:
        return f"{obstacle}, which DFLASH does in chains only"
    pool = _attended_pool(target_runner.token_to_kv_pool)
    for part in (pool.full_kv_pool, pool.swa_kv_pool) if isinstance(pool, SWAKVPool) else (pool,):
        obstacle = None if type(part) is MLATokenToKVPool else pool_obstacle(part)
        if obstacle is not None:
            return f"{obstacle}, where DFLASH moves no tokens"
    num_nodes = get_spec().speculative_num_draft_tokens
    return None if target_runner.device == "cpu" else memory_obstacle(target_runner, num_nodes)


def memory_obstacle(target_runner: ModelRunner, num_nodes: int) -> str | None:
    """Return which layer's trees of N nodes do not fit into the GPU's shared memory, in words; None: all fit."""
    # Imported here: a machine without a GPU needs no Triton.
    from sglang_dflash.ops.kernels.attend_trees import shared_memory_obstacle, shares_memory

    pool = target_runner.token_to_kv_pool
    for name, layer in target_runner.model.named_modules():
        if not isinstance(layer, RadixAttention):
            continue
        k_cache, v_cache = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        shape = (num_nodes, layer.tp_q_head_num, *k_cache.shape[1:], v_cache.shape[2])
        is_v_in_k = shares_memory(k_cache, v_cache)
        obstacle = shared_memory_obstacle(*shape, target_runner.dtype, k_cache.device, is_v_in_k)
        if obstacle is not None:
            return f"in layer {name} of the target {obstacle}"
    return None


def _attended_pool(pool: KVCache) -> KVCache:
    """Return the pool of the layers with attention; a target with recurrent layers has them in a pool of its own."""
    return pool.full_kv_pool if isinstance(pool, HybridLinearKVPool) else pool


def layer_obstacle(target_model: nn.Module) -> str | None:
    """Return which layer :meth:`NodeAttentionBackend.forward_extend` cannot compute, in words; None: there is none."""
    for name, layer in target_model.named_modules():
        if not isinstance(layer, RadixAttention):
            continue
        obstacles = {
            "attends to all tokens": layer.attn_type != AttentionType.DECODER,
            "attends to an encoder's output": layer.is_cross_attention,
            "attends in chunks": layer.use_irope,
            "scales by position": layer.xai_temperature_len > 0,
        }
        for obstacle, is_there in obstacles.items():
            if is_there:
                return f"layer {name} of the target {obstacle}"
    return None


def pool_obstacle(pool: KVCache) -> str | None:
    """Return why a token's key and value are not stored as plain numbers in one slot, in words; None: they are."""
    if isinstance(pool, SWAKVPool):
        return pool_obstacle(pool.full_kv_pool) or pool_obstacle(pool.swa_kv_pool)
    if type(pool) is not MHATokenToKVPool:
        return f"the target's KV is in a {type(pool).__name__}"
    if pool.kv_cache_layout != "nhd" or pool.is_quantized_kv_cache:
        return f"the target's KV is laid out as {pool.kv_cache_layout}, by {type(pool.quant_method).__name__}"
    return None


def kv_rows(pool: KVCache) -> list[tuple[KVRows, bool]]:
    """Return the KV rows of a token in a pool that has no :func:`tree_obstacle`.

    Returns:
        Rows, and whether they are in slots of the pool of sliding layers.
    """
    pool = _attended_pool(pool)
    if isinstance(pool, SWAKVPool):
        parts = ((pool.full_kv_pool, False), (pool.swa_kv_pool, True))
        return [(rows, is_sliding) for part, is_sliding in parts for rows, _ in kv_rows(part)]
    buffers = pool.kv_buffer if isinstance(pool, MLATokenToKVPool) else [*pool.k_buffer, *pool.v_buffer]
    return [(KVRows.of(buffers), False)] if buffers else []
