"""Drafter KV from target hidden states: fc, hidden_norm, every layer's k and v, k_norm, RoPE, one write.

Shapes: T tokens, F captured target layers, H hidden size, L drafter layers.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch.nn import functional

from sglang_dflash import ops
from sglang_dflash.draft.model import DFlashDraftModel
from sglang_dflash.types import KVBuffers

# Prompt tokens that are appended to the drafter's context at a time, which bounds the memory for a long prompt.
CONTEXT_TOKENS = 4096
# Rows of the identity in one product.
_IDENTITY_ROWS = 1024


class ContextWriter:
    """Appends target hidden states to the drafter's context.

    The slots are those of the target's own KV. So a cache hit, a retraction or an eviction of the target's tokens
    covers the drafter's context too.
    """

    def __init__(self, model: DFlashDraftModel, pool: MHATokenToKVPool) -> None:
        attentions = [layer.self_attn for layer in model.layers]
        first = attentions[0]
        self._model = model
        self._attentions = attentions
        self._rotary = first.rotary_emb
        self._eps = first.k_norm.variance_epsilon
        self._kv_shape = (len(attentions), 2, first.num_kv_heads, first.head_dim)
        self._buffers = KVBuffers(pool.k_buffer, pool.v_buffer, pool.k_data_ptrs, pool.v_data_ptrs, pool.dtype)
        # One GEMM for all layers. CUDA graphs hold the address of these weights.
        self._weight = torch.cat(self._kv_weights())
        self._bias = None if first.qkv_proj.bias is None else torch.cat(self._kv_biases())
        self._k_norm_weight = torch.stack([attention.k_norm.weight.data for attention in attentions])

    def _kv_weights(self) -> list[torch.Tensor]:
        return [dense_weight(attention.qkv_proj)[attention.q_size :] for attention in self._attentions]

    def _kv_biases(self) -> list[torch.Tensor]:
        return [attention.qkv_proj.bias.data[attention.q_size :] for attention in self._attentions]

    def fuse_weights(self) -> None:
        """Copy the layers' k and v weights again, after they have changed."""
        torch.cat(self._kv_weights(), out=self._weight)
        if self._bias is not None:
            torch.cat(self._kv_biases(), out=self._bias)
        torch.stack([attention.k_norm.weight.data for attention in self._attentions], out=self._k_norm_weight)

    @torch.no_grad()
    def write(
        self,
        features: torch.Tensor,
        positions: torch.Tensor,
        cache_loc: torch.Tensor,
        accept_lens: torch.Tensor | None = None,
    ) -> None:
        """Append tokens to the drafter's context.

        Args:
            features: [T, F * H]. Outputs of the captured target layers.
            positions: [T] int64. True positions.
            cache_loc: [T] int64. KV slots.
            accept_lens: [bs]. For verified blocks, T = bs * W: only the first `accept_lens` tokens of each block are
                written. None: all tokens are.
        """
        # Only a prefill is split. Verified batches are small, and blocks must stay whole.
        chunk = CONTEXT_TOKENS if accept_lens is None else max(features.shape[0], 1)
        for start in range(0, features.shape[0], chunk):
            rows = slice(start, start + chunk)
            hidden = self._model.project_features(features[rows])
            kv = functional.linear(hidden, self._weight, self._bias)
            ops.write_context_kv(
                kv.view(-1, *self._kv_shape),
                self._k_norm_weight,
                self._eps,
                self._rotary.cos_sin_cache,
                positions[rows],
                cache_loc[rows],
                accept_lens,
                self._buffers,
            )


def dense_weight(layer: LinearBase) -> torch.Tensor:
    """Return the weight of a linear layer, [N, K]. That of a quantised layer is what the layer multiplies with.

    Layouts of quantised weights differ by method and GPU. The product with the identity does not. A static scale of
    inputs would round its ones, or clip them, so they become the largest input of that scale.
    """
    if isinstance(layer.quant_method, UnquantizedLinearMethod):
        return layer.weight.data
    scale = dict(layer.named_parameters()).get("input_scale")
    largest = 1.0 if scale is None else torch.finfo(torch.float8_e4m3fn).max * scale.float().max()
    inputs = (torch.eye(layer.input_size, device=layer.weight.device) * largest).to(layer.params_dtype)
    parts = [layer.quant_method.apply(layer, rows, None) for rows in inputs.split(_IDENTITY_ROWS)]
    return (torch.cat(parts) / largest).t()
