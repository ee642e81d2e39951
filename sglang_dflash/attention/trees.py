"""The target's attention of drafted trees, on whatever backend it prefills with, and of chains in place of FlashInfer.

A backend verifies a block as a chain. Of a tree every node sees its own ancestors, and is where these, not its slot,
put it. One kernel of ours does that for all of them (`ops.attend_trees`), since it finds keys by their slots. A chain
is a tree of which every node is behind all before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVCache, KVWriteLoc, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import nn

from sglang_dflash import ops
from sglang_dflash.checkpoint.config import ConfigError
from sglang_dflash.types import KeyChunks, KVRows


class NodeAttentionBackend(AttentionBackend):
    """Takes the place of a target's attention backend while it verifies nodes that know their ancestors.

    Attributes:
        req_to_token: the target's, [rows, width] int32.
        req_to_token_pool, token_to_kv_pool: the target's, which its layers look for here.
        forward_metadata: [bs * N] int64, slots of the nodes in the pool of the sliding layers; None: they have none.
        kv_index_translator: the target's.
    """

    def __init__(self, target_runner: ModelRunner) -> None:
        super().__init__()
        self.kv_index_translator = target_runner.kv_index_translator
        self.forward_metadata: torch.Tensor | None = None
        # Of the forward that is under way, by window and shape of its layers.
        self._splits: dict[tuple, KeyChunks | None] = {}
        self.token_to_kv_pool = target_runner.token_to_kv_pool
        self._swa_pool = self.token_to_kv_pool if isinstance(self.token_to_kv_pool, SWAKVPool) else None
        self.req_to_token_pool = target_runner.req_to_token_pool
        self.req_to_token = self.req_to_token_pool.req_to_token

    def _ancestors(self, forward_batch: ForwardBatch) -> torch.Tensor:
        """[bs, N] int64, as in :class:`sglang_dflash.types.Trees`."""
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
        """Attention of all nodes, T of them.

        Args:
            q: [T, heads * head_dim]; of MLA the part without RoPE, if there is `q_rope`.
            k, v: [T, KV heads, head_dim], None: the pool has them; of MLA the latent, and whatever.
            q_rope: [T, heads, rope_dim] or [T, heads * rope_dim], of MLA.
            k_rope: [T, 1, rope_dim], of MLA.
            sinks: [heads].

        Returns:
            [T, heads * v_head_dim].
        """
        ancestors, heads = self._ancestors(forward_batch), layer.tp_q_head_num
        if save_kv_cache and k is not None:
            slots = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=self.forward_metadata)
            if k_rope is not None:
                self.token_to_kv_pool.set_mla_kv_buffer(layer, slots.loc, k, k_rope)
            elif layer.k_scale is None:
                self.token_to_kv_pool.set_kv_buffer(layer, slots, k, v)
            elif isinstance(self.token_to_kv_pool, MLATokenToKVPool):
                # It takes no scales.
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
        """How the keys of a forward are divided: made in its first layer of that window and shape, for all of them."""
        if shape not in self._splits:
            self._splits[shape] = ops.split_trees(forward_batch.seq_lens, forward_batch.req_pool_indices, *shape)
        return self._splits[shape]

    def _slot_map(self, layer: RadixAttention) -> torch.Tensor | None:
        if self._swa_pool is None or not self._swa_pool.layers_mapping[layer.layer_id][1]:
            return None
        return self._swa_pool.full_to_swa_index_mapping


class TreeAttentionBackend(NodeAttentionBackend):
    """Of trees (`DFlashVerifyInput.trees`)."""

    def __init__(self, target_runner: ModelRunner) -> None:
        """
        Raises:
            ConfigError: the target attends in a way that trees are not verified in.
        """
        obstacle = tree_obstacle(target_runner)
        if obstacle is not None:
            raise ConfigError(f"--speculative-eagle-topk: {obstacle}; leave the flag out.")
        super().__init__(target_runner)
        self._runner = target_runner
        self._rows = kv_rows(self.token_to_kv_pool)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Meanwhile the target's forwards go through this backend."""
        original, self._runner.attn_backend = self._runner.attn_backend, self
        try:
            yield
        finally:
            self._runner.attn_backend = original

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """There is none: all it reads are tensors of the batch."""

    def _ancestors(self, forward_batch: ForwardBatch) -> torch.Tensor:
        return forward_batch.spec_info.trees.ancestors

    def move_kv(self, slots: torch.Tensor, paths: torch.Tensor, accept_lens: torch.Tensor) -> None:
        """Put the KV of accepted paths, of all layers, where that of chains is: see `ops.reference.move_kv`."""
        for rows, has_own_slots in self._rows:
            slot_map = self._swa_pool.full_to_swa_index_mapping if has_own_slots else None
            ops.move_kv(rows, slots, paths, accept_lens, slot_map)


class ChainAttentionBackend(NodeAttentionBackend):
    """Of chains, in graphs (`attention.plan.chain_attention`)."""

    def __init__(self, target_runner: ModelRunner) -> None:
        super().__init__(target_runner)
        # By N, of the largest batch.
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
    """Why a target's trees cannot be verified, in words; None: they can."""
    obstacle = layer_obstacle(target_runner.model)
    if obstacle is not None:
        return f"{obstacle}, which DFLASH does in chains only"
    pool = target_runner.token_to_kv_pool
    for part in (pool.full_kv_pool, pool.swa_kv_pool) if isinstance(pool, SWAKVPool) else (pool,):
        obstacle = None if type(part) is MLATokenToKVPool else pool_obstacle(part)
        if obstacle is not None:
            return f"{obstacle}, where DFLASH moves no tokens"
    return None


def layer_obstacle(target_model: nn.Module) -> str | None:
    """Which layer does more than :meth:`NodeAttentionBackend.forward_extend` does, in words; None: there is none."""
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
    """Why not all of a token's key and value in a layer is in its slot as it is used, in words; None: it is."""
    if isinstance(pool, SWAKVPool):
        return pool_obstacle(pool.full_kv_pool) or pool_obstacle(pool.swa_kv_pool)
    if type(pool) is not MHATokenToKVPool:
        return f"the target's KV is in a {type(pool).__name__}"
    if pool.kv_cache_layout != "nhd" or pool.is_quantized_kv_cache:
        return f"the target's KV is laid out as {pool.kv_cache_layout}, by {type(pool.quant_method).__name__}"
    return None


def kv_rows(pool: KVCache) -> list[tuple[KVRows, bool]]:
    """All that a target's pool has of a token, and whether that is in slots of a window's pool; of a pool that is no
    :func:`tree_obstacle`."""
    if isinstance(pool, SWAKVPool):
        parts = ((pool.full_kv_pool, False), (pool.swa_kv_pool, True))
        return [(rows, is_sliding) for part, is_sliding in parts for rows, _ in kv_rows(part)]
    buffers = pool.kv_buffer if isinstance(pool, MLATokenToKVPool) else [*pool.k_buffer, *pool.v_buffer]
    return [(KVRows.of(buffers), False)] if buffers else []
