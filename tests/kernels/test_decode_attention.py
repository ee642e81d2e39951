"""Attention of the generation of conversations (scripts/training)."""

import pytest
import torch
from training.smollm2.decode_attention import torch_decode_attention, triton_decode_attention

TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2}
# Triton's interpreter multiplies the bits of bfloat16 numbers as if they were integers.
DTYPES = [torch.float16, torch.bfloat16] if torch.cuda.is_available() else [torch.float16]


def fused_queries(num_rows, num_heads, num_kv_heads, head_dim, dtype, device):
    """Return queries [rows, heads, head_dim] as part of a projection to queries, keys and values."""
    qkv = torch.randn(num_rows, num_heads + 2 * num_kv_heads, head_dim, device=device, dtype=dtype)
    return qkv[:, :num_heads]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "num_heads", "num_kv_heads", "head_dim"), [(3, 9, 3, 64), (1, 16, 1, 32), (2, 5, 5, 16)]
)
@pytest.mark.parametrize(("length", "position"), [(1, 0), (70, 0), (70, 62), (70, 63), (130, 64), (131, 130)])
def test_matches_reference(num_rows, num_heads, num_kv_heads, head_dim, length, position, dtype, device):
    queries = fused_queries(num_rows, num_heads, num_kv_heads, head_dim, dtype, device)
    keys, values = torch.randn(2, num_rows, num_kv_heads, length, head_dim, device=device, dtype=dtype)
    position = torch.tensor([position], device=device)

    out = triton_decode_attention(queries, keys, values, position)

    assert out.shape == queries.shape and out.dtype == dtype
    expected = torch_decode_attention(queries, keys, values, position)
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE[dtype])


def test_reads_nothing_after_its_position(device):
    queries = fused_queries(2, 9, 3, 64, torch.float16, device)
    keys, values = torch.randn(2, 2, 3, 100, 64, device=device, dtype=torch.float16)
    position = torch.tensor([40], device=device)
    expected = triton_decode_attention(queries, keys, values, position)
    keys[:, :, 41:] = float("nan")
    values[:, :, 41:] = float("nan")

    torch.testing.assert_close(triton_decode_attention(queries, keys, values, position), expected, rtol=0, atol=0)
