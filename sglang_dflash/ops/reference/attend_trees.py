"""Attention of drafted trees to their context and to themselves, in torch.

Shapes: bs requests, N nodes of each, H query heads, G KV heads, K and V numbers of a key and of a value.
"""

from __future__ import annotations

import torch

from sglang_dflash.types import KeyChunks


def split_trees(
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    window: int | None,
    num_nodes: int,
    heads: int,
    kv_heads: int,
    key_size: int,
    value_size: int,
    dtype: torch.dtype,
) -> KeyChunks | None:
    """Divide the keys of a batch among thread blocks, for all layers of one shape.

    Args:
        seq_lens, req_pool_indices: [bs] int64.
        window: as in `attend_trees`.
        num_nodes: N.
        heads, kv_heads, key_size, value_size: H, G, K and V.
        dtype: of queries.

    Returns:
        The argument `split` of `attend_trees`; None, as torch divides nothing.
    """
    return None


def attend_trees(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    slot_map: torch.Tensor | None,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float,
    window: int | None,
    logit_cap: float,
    sinks: torch.Tensor | None,
    k_scale: float,
    v_scale: float,
    split: KeyChunks | None,
) -> torch.Tensor:
    """Attend from every node to the request's committed tokens, its ancestors and itself, whose KV is in the cache.

    Args:
        query: [bs * N, H, K]; rows and heads may be strided.
        k_cache: [slots, G, K]; in fp8, or in the model's dtype.
        v_cache: [slots, G, V].
        req_to_token: [rows, width] int32. Slots: the request's position p at p, its node i at `seq_lens + i`.
        req_pool_indices: [bs] int64.
        slot_map: [slots] int64, from those slots to the cache's; None: they are the same.
        seq_lens: [bs] int64.
        positions: [bs * N] int64, true positions of the nodes.
        ancestors: [bs, N] int64, bits; see :class:`sglang_dflash.types.Trees`.
        scale: of the products of queries and keys.
        window: tokens that a token sees before itself; None: all.
        logit_cap: c of c * tanh(x / c), applied to scaled products x; 0: none.
        sinks: [H]. One more logit of each head, without a value; None: there are none.
        k_scale, v_scale: factors of the keys and values of the cache.
        split: of `split_trees`, for these requests and shapes. It is written, and has its old values after the call.

    Returns:
        [bs * N, H, V], the dtype of `query`.
    """
    bs, num_nodes = ancestors.shape
    heads, kv_heads = query.shape[1], k_cache.shape[1]
    output = query.new_empty(*query.shape[:2], v_cache.shape[2])
    nodes = torch.arange(num_nodes, device=query.device)
    for i in range(bs):
        rows, context = slice(i * num_nodes, (i + 1) * num_nodes), int(seq_lens[i])
        # Nothing before `first` is seen, and its slot in a pool for windows may be another's by now.
        first = 0 if window is None else max(0, context - window)
        slots = req_to_token[req_pool_indices[i], first : context + num_nodes].long()
        if slot_map is not None:
            slots = slot_map[slots]
        key = (k_cache[slots].float() * k_scale).repeat_interleave(heads // kv_heads, dim=1)
        value = (v_cache[slots].float() * v_scale).repeat_interleave(heads // kv_heads, dim=1)
        of_context = torch.arange(first, context, device=query.device)
        of_nodes = positions[rows]
        distance = of_nodes[:, None] - torch.cat((of_context, of_nodes))
        is_seen = torch.ones_like(distance, dtype=torch.bool)
        is_seen[:, context - first :] = (ancestors[i][:, None] >> nodes & 1) == 1
        if window is not None:
            is_seen &= distance <= window
        logits = torch.einsum("nhk,shk->hns", query[rows].float(), key) * scale
        if logit_cap > 0:
            logits = logit_cap * torch.tanh(logits / logit_cap)
        logits = logits.masked_fill(~is_seen, -torch.inf)
        if sinks is not None:
            logits = torch.cat((logits, sinks.float()[:, None, None].expand(-1, num_nodes, 1)), dim=2)
        weights = logits.softmax(dim=2)[:, :, : len(slots)]
        output[rows] = torch.einsum("hns,shv->nhv", weights, value).to(query.dtype)
    return output
