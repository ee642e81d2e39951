"""SGLang's `torch_native` attention backend, extended for speculative decoding.

Legend: `bs` requests, `B` query rows per verified request, `Hq` query heads, `Hkv` KV heads, `D` head size.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class VerifyTorchNativeAttnBackend(TorchNativeAttnBackend):
    """Adds `ForwardMode.TARGET_VERIFY`, and reads the KV of windowed layers from an SWA pool.

    A verified request has `B = spec_info.draft_token_num` query rows at positions seq_lens..seq_lens+B-1,
    where `seq_lens` does not count the block. A query at position p sees the keys at q <= p (the target's
    chain), or every key of the context and of the block if the layer is `ENCODER_ONLY` (the drafter's block).
    A window narrows that to p - sliding_window_size <= q, and q <= p + sliding_window_size; SGLang counts the
    query itself apart, so `sliding_window_size` is a model's window less one.

    Every other forward goes to the parent class, except where it would read a windowed layer's KV at the
    locations of the full pool.
    """

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> Tensor:
        """Attention of an extend or verify forward.

        Args:
            q: [num_tokens, Hq * D], request after request; a verify forward has num_tokens = bs * B.
            k: [num_tokens, Hkv, D], or None if the KV pool has it already.
            v: [num_tokens, Hkv, D], or None.
            layer: the attention layer, for its head counts, mask and window.
            forward_batch: with `out_cache_loc` mapped in `req_to_token`.
            save_kv_cache: write k and v at `out_cache_loc` first.

        Returns:
            [num_tokens, Hq * D], the dtype of q.
        """
        if forward_batch.forward_mode.is_target_verify():
            context_lens = forward_batch.seq_lens.tolist()
            query_lens = [forward_batch.spec_info.draft_token_num] * len(context_lens)
        elif self.use_sliding_window_kv_pool:
            context_lens = forward_batch.extend_prefix_lens.tolist()
            query_lens = forward_batch.extend_seq_lens.tolist()
        else:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, context_lens, query_lens)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> Tensor:
        """Attention of a decode forward: one query row per request, at position seq_lens - 1.

        Args and result as :meth:`forward_extend`, with num_tokens = bs.
        """
        if not self.use_sliding_window_kv_pool:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        context_lens = (forward_batch.seq_lens - 1).tolist()
        query_lens = [1] * len(context_lens)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, context_lens, query_lens)

    def _attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        context_lens: list[int],
        query_lens: list[int],
    ) -> Tensor:
        """Return the attention of query_lens[i] tokens after context_lens[i] keys, for each request i."""
        if save_kv_cache and k is not None and v is not None:
            locations = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, locations, k, v)

        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        req_to_token = self.req_to_token_pool.req_to_token
        bidirectional = layer.attn_type == AttentionType.ENCODER_ONLY
        window = layer.sliding_window_size
        windowed = window is not None and window > -1
        in_swa_pool = self.use_sliding_window_kv_pool and self.token_to_kv_pool.layers_mapping[layer.layer_id][1]

        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output = queries.new_empty(queries.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        rows = forward_batch.req_pool_indices.tolist()
        start = 0
        for row, context_len, query_len in zip(rows, context_lens, query_lens, strict=True):
            # No query of this request sees a key before `first`. An SWA pool may have given its slot away.
            first = max(0, context_len - window) if windowed else 0
            locations = req_to_token[row, first : context_len + query_len].to(torch.int64)
            if in_swa_pool:
                locations = self.token_to_kv_pool.translate_loc_from_full_to_swa(locations)
            positions = torch.arange(first, context_len + query_len)
            output[start : start + query_len] = scaled_dot_product_attention(
                queries[start : start + query_len].transpose(0, 1)[None],
                keys[locations].to(q.dtype).transpose(0, 1)[None],
                values[locations].to(q.dtype).transpose(0, 1)[None],
                attn_mask=_visible(positions, query_len, bidirectional, window if windowed else None),
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )[0].transpose(0, 1)
            start += query_len
        return output.view(-1, layer.tp_q_head_num * layer.v_head_dim)


def _visible(positions: Tensor, query_len: int, bidirectional: bool, window: int | None) -> Tensor | None:
    """Return the mask of keys that each query sees.

    Args:
        positions: [num_keys] int64, ascending; the last `query_len` are also the queries'.
        query_len: number of queries.
        bidirectional: a query sees the keys after it too.
        window: how many keys a query sees on each side that it sees, itself apart; None for all.

    Returns:
        [query_len, num_keys] bool, or None if every query sees every key.
    """
    if bidirectional and window is None:
        return None
    distance = positions[-query_len:, None] - positions
    visible = torch.ones_like(distance, dtype=torch.bool) if bidirectional else distance >= 0
    if window is not None:
        visible &= distance.abs() <= window
    return visible
