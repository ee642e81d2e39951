import pytest
import torch
from test_write_context_kv import rope_cache

from sglang_dflash.ops.kernels.qk_norm_rope_set_kv import qk_norm_rope_set_kv
from sglang_dflash.ops.reference.qk_norm_rope_set_kv import qk_norm_rope_set_kv as reference

SLOTS = 200


def random_args(tokens, q_heads, kv_heads, head_dim, dtype, is_early, device):
    """Return all arguments. The projections are a view of a wider tensor, and the KV is filled with NaN."""
    width = (q_heads + 2 * kv_heads) * head_dim
    k, v = torch.full((2, SLOTS, kv_heads, head_dim), float("nan"), dtype=dtype, device=device)
    return (
        torch.randn(tokens, width + 8, device=device).to(dtype)[:, :width],
        *(torch.rand(2, head_dim, device=device).to(dtype) + 0.5),
        1e-6,
        rope_cache(300, head_dim, device),
        torch.randint(0, 300, (tokens,), device=device),
        torch.randperm(SLOTS, device=device)[:tokens],
        k,
        v,
        is_early,
    )


@pytest.mark.parametrize("tokens", [0, 1, 17, 63])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(1, 1, 64), (4, 2, 64), (9, 3, 80), (32, 8, 128)])
@pytest.mark.parametrize(("dtype", "is_early"), [(torch.float32, False), (torch.bfloat16, True)])
def test_matches_reference(tokens, q_heads, kv_heads, head_dim, dtype, is_early, device):
    args = []
    for _ in range(2):
        torch.manual_seed(tokens)
        args.append(random_args(tokens, q_heads, kv_heads, head_dim, dtype, is_early, device))
    got, want = args
    outputs = qk_norm_rope_set_kv(*got), reference(*want)
    assert all(out.is_contiguous() for side in outputs for out in side)
    # bf16: Triton's interpreter truncates where a GPU rounds, so it may be an ulp off. A wrong norm, angle or head
    # exceeds either bound by far.
    bound = 1e-6 if dtype == torch.float32 else 2e-3 if device == "cuda" else 2**-6
    for mine, theirs in zip((*outputs[0], *got[-3:-1]), (*outputs[1], *want[-3:-1]), strict=True):
        assert mine.shape == theirs.shape
        assert torch.equal(mine.isnan(), theirs.isnan())
        mine, theirs = mine.double().nan_to_num(), theirs.double().nan_to_num()
        assert (mine - theirs).norm() <= bound * theirs.norm()


@pytest.mark.parametrize("apply", [qk_norm_rope_set_kv, reference])
def test_queries_and_keys_have_their_own_norms_and_turn_alike(apply, device):
    """Position 0 has no rotation. The product of a query and a key depends on the distance of their positions."""
    q, k, v = torch.randn(3, 64, device=device)
    rows = torch.cat((q, k, v)).repeat(4, 1)
    k_buffer, v_buffer = torch.zeros(2, SLOTS, 1, 64, device=device)
    q_weight, k_weight = torch.full((64,), 2.0, device=device), torch.full((64,), 3.0, device=device)
    positions, slots = torch.tensor([0, 5, 10, 15], device=device), torch.tensor([7, 1, 9, 4], device=device)
    angles = rope_cache(20, 64, device)
    turned_q, turned_k, values = apply(
        rows, q_weight, k_weight, 0.0, angles, positions, slots, k_buffer, v_buffer, False
    )
    torch.testing.assert_close(turned_q[0], 2 * q / q.square().mean().sqrt())
    torch.testing.assert_close(turned_k[0], 3 * k / k.square().mean().sqrt())
    products = (turned_q[1:] * turned_k[:-1]).sum(-1)
    torch.testing.assert_close(products, products[:1].expand(3), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(turned_q[1], turned_q[0], atol=0.1)
    assert torch.equal(k_buffer[slots, 0], turned_k)
    assert torch.equal(v_buffer[slots, 0], values) and torch.equal(values, v.expand(4, 64))
    k_buffer[slots] = v_buffer[slots] = 0
    assert not k_buffer.any() and not v_buffer.any()
