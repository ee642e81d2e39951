"""Attention of one new token per row, over a cache that all rows have filled to the same length."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

_TILE = 64
# Fewest rows of a matrix product in Triton.
_QUERY_ROWS = 16


def decode_attention(queries: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """Let every row's query attend to the keys up to `position`, which is its own position.

    Args:
        queries: [rows, heads, head_dim]. Any strides, except that the last dimension is contiguous.
        keys, values: [rows, kv_heads, length, head_dim], contiguous. A KV head serves heads / kv_heads consecutive
            query heads.
        position: [1] int64 on the device, so that one CUDA graph serves every step.

    Returns:
        [rows, heads, head_dim].
    """
    attend = triton_decode_attention if queries.is_cuda else torch_decode_attention
    return attend(queries, keys, values, position)


def torch_decode_attention(queries: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """Compute :func:`decode_attention` in torch. Masked values must be finite."""
    visible = torch.arange(keys.shape[2], device=keys.device) <= position
    out = F.scaled_dot_product_attention(queries[:, :, None], keys, values, attn_mask=visible[None], enable_gqa=True)
    return out[:, :, 0]


def triton_decode_attention(queries: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """Compute :func:`decode_attention` in Triton. head_dim is a power of two >= 16, and heads / kv_heads <= 16."""
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads, length = keys.shape[1:3]
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    _decode_attention_kernel[(num_rows, num_kv_heads)](
        queries,
        queries.stride(0),
        queries.stride(1),
        keys,
        values,
        length,
        position,
        out,
        head_dim**-0.5,
        HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        DIM=head_dim,
        QUERY_ROWS=_QUERY_ROWS,
        TILE=_TILE,
    )
    return out


@triton.jit
def _decode_attention_kernel(
    queries,
    query_row_stride,
    query_head_stride,
    keys,
    values,
    length,
    position,
    out,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    num_keys = tl.load(position).to(tl.int32) + 1
    head = tl.arange(0, QUERY_ROWS)
    dim = tl.arange(0, DIM)
    is_head = (head < GROUP)[:, None]
    query_offsets = (kv_head * GROUP + head)[:, None] * query_head_stride + dim
    query = tl.load(queries + row * query_row_stride + query_offsets, mask=is_head, other=0.0)
    cache_start = (row * (HEADS // GROUP) + kv_head) * length * DIM

    best = tl.full([QUERY_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([QUERY_ROWS], tl.float32)
    weighted = tl.zeros([QUERY_ROWS, DIM], tl.float32)
    for start in range(0, num_keys, TILE):
        token = start + tl.arange(0, TILE)
        is_key = token < num_keys
        offsets = cache_start + token[:, None] * DIM + dim
        key = tl.load(keys + offsets, mask=is_key[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(key)) * scale
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp(best - new_best)
        weights = tl.exp(scores - new_best[:, None])
        value = tl.load(values + offsets, mask=is_key[:, None], other=0.0)
        total = total * shrink + tl.sum(weights, axis=1)
        weighted = weighted * shrink[:, None] + tl.dot(weights.to(value.dtype), value)
        best = new_best
    out_offsets = (row * HEADS + kv_head * GROUP + head)[:, None] * DIM + dim
    tl.store(out + out_offsets, (weighted / total[:, None]).to(out.dtype.element_ty), mask=is_head)
