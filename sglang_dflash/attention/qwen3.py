"""Qwen3's attention of blocks, with q_norm, k_norm, RoPE and the KV write in one launch instead of three.

A block has few rows, so three launches cost more than the memory that they move. FlashInfer and Triton also copy
queries, keys and values that are not contiguous, as parts of a projection's output are. Here they come out contiguous.

Shapes: T tokens, H hidden size.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import get_token_to_kv_pool
from sglang.srt.runtime_context import get_exec

from sglang_dflash import ops
from sglang_dflash.attention.verify_input import DFlashVerifyInput
from sglang_dflash.ops import small_m_linear

logger = logging.getLogger(__name__)


def forward(
    original, attention, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: ForwardBatch
) -> torch.Tensor:
    """AROUND `Qwen3Attention.forward`: positions [T], hidden_states [T, H] in, [T, H] out."""
    if not isinstance(forward_batch.spec_info, DFlashVerifyInput):
        return original(attention, positions, hidden_states, forward_batch)
    pool = get_token_to_kv_pool()
    obstacle = _obstacle(attention, pool, hidden_states.dtype)
    if obstacle is not None:
        _log_obstacle(obstacle)
        return original(attention, positions, hidden_states, forward_batch)
    qkv, _ = attention.qkv_proj(hidden_states)
    q, k, v = ops.qk_norm_rope_set_kv(
        qkv,
        attention.q_norm.weight,
        attention.k_norm.weight,
        attention.q_norm.variance_epsilon,
        attention.rotary_emb.cos_sin_cache,
        positions,
        forward_batch.out_cache_loc,
        *pool.get_kv_buffer(attention.attn.layer_id),
        small_m_linear.runs_few_rows(attention.qkv_proj, hidden_states.shape[0]),
    )
    output, _ = attention.o_proj(attention.attn(q, k, v, forward_batch, save_kv_cache=False))
    return output


def _obstacle(attention, pool, dtype: torch.dtype) -> str | None:
    """Return why a layer has to use SGLang's own steps, in words; None: it need not."""
    rotary = attention.rotary_emb
    if (
        # Other classes do not rotate by one row of `cos_sin_cache` for each position.
        not isinstance(rotary, RotaryEmbedding)
        or (type(rotary).forward_cuda, type(rotary).forward_native)
        != (RotaryEmbedding.forward_cuda, RotaryEmbedding.forward_native)
        or not rotary.is_neox_style
        or rotary.rotary_dim != attention.head_dim
    ):
        return f"its rotary embedding is a {type(rotary).__name__}"
    if attention.q_norm.variance_epsilon != attention.k_norm.variance_epsilon:
        return "its q_norm and k_norm have different epsilons"
    if get_exec().deterministic.rl_on_policy_target is not None:
        return "--rl-on-policy-target asks for the trainer's rounding"
    if type(pool) is not MHATokenToKVPool or pool.kv_cache_layout != "nhd":
        return f"its KV is in a {type(pool).__name__}"
    if pool.dtype != dtype:
        return f"its KV is stored in {str(pool.dtype).removeprefix('torch.')}"
    return None


@cache
def _log_obstacle(obstacle: str) -> None:
    logger.info("Qwen3's attention of blocks takes three launches per layer for norms, RoPE and KV: %s.", obstacle)
