import pytest
import torch

from sglang_dflash.ops.kernels.write_context_kv import write_context_kv
from sglang_dflash.ops.reference.write_context_kv import write_context_kv as reference
from sglang_dflash.types import KVBuffers

SLOTS = 200


def buffers(layers, heads, head_dim, dtype, device) -> KVBuffers:
    """Return a pool filled with NaN, in SGLang's storage dtype."""
    empty = torch.full((SLOTS, heads, head_dim), float("nan"), device=device).to(dtype)
    if dtype.itemsize == 1:
        empty = empty.view(torch.uint8)
    k, v = ([empty.clone() for _ in range(layers)] for _ in range(2))
    pointers = [torch.tensor([t.data_ptr() for t in side], dtype=torch.uint64, device=device) for side in (k, v)]
    return KVBuffers(k, v, *pointers, dtype)


def rope_cache(positions, head_dim, device):
    inverse = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.arange(positions, device=device)[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def random_args(tokens, layers, heads, head_dim, dtype, device):
    """Return all arguments except the buffers."""
    return (
        torch.randn(tokens, layers, 2, heads, head_dim, device=device).to(dtype),
        torch.rand(layers, head_dim, device=device).to(dtype) + 0.5,
        1e-6,
        rope_cache(300, head_dim, device),
        torch.randint(0, 300, (tokens,), device=device),
        torch.randperm(SLOTS, device=device)[:tokens],
        None,
    )


@pytest.mark.parametrize("tokens", [0, 1, 17, 63])
@pytest.mark.parametrize(("layers", "heads", "head_dim"), [(1, 1, 64), (3, 2, 64), (2, 3, 80), (5, 8, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_reference(tokens, layers, heads, head_dim, dtype, device):
    args = random_args(tokens, layers, heads, head_dim, dtype, device)
    got, want = (buffers(layers, heads, head_dim, dtype, device) for _ in range(2))
    write_context_kv(*args, got)
    reference(*args, want)
    # bf16: Triton's interpreter truncates where a GPU rounds, so it may be an ulp off. A wrong norm, angle or layer
    # exceeds either bound by far.
    bound = 1e-6 if dtype == torch.float32 else 2e-3 if device == "cuda" else 2**-6
    for side in ("k", "v"):
        for mine, theirs in zip(getattr(got, side), getattr(want, side), strict=True):
            assert torch.equal(mine.isnan(), theirs.isnan())
            mine, theirs = mine.double().nan_to_num(), theirs.double().nan_to_num()
            assert (mine - theirs).norm() <= bound * theirs.norm()


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"),
    [
        (torch.float32, torch.float8_e4m3fn),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.bfloat16, torch.float8_e5m2),
    ],
)
def test_pool_of_another_dtype(dtype, pool_dtype, device):
    tokens, layers, heads, head_dim = 63, 2, 3, 80
    args = random_args(tokens, layers, heads, head_dim, dtype, device)
    got, want = (buffers(layers, heads, head_dim, pool_dtype, device) for _ in range(2))
    write_context_kv(*args, got)
    reference(*args, want)
    for mine, theirs in zip(got.v, want.v, strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(got.k, want.k, strict=True):
        mine, theirs = (side.view(pool_dtype).double().nan_to_num() for side in (mine, theirs))
        # A key that is an ulp off may round to the next number of the pool's dtype, an eighth or a quarter away.
        assert (mine - theirs).norm() <= 2**-4 * theirs.norm()


@pytest.mark.parametrize("pool_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_is_rounded_as_torch_rounds(dtype, pool_dtype, device):
    """Round every bfloat16 number, with ties, subnormals, overflow and NaN; for float32 also its neighbours."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    if dtype == torch.float32:
        bits = values.float().view(torch.int32)
        values = torch.cat((bits - 1, bits, bits + 1)).view(torch.float32)
    values = values.to(device).view(-1, 8, 128)
    tokens = values.shape[0]
    kv = torch.stack((torch.zeros_like(values), values), dim=1)[:, None]
    slots = torch.randperm(SLOTS, device=device)[:tokens]
    norm, positions = torch.ones(1, 128, device=device).to(dtype), torch.zeros_like(slots)
    out = buffers(1, 8, 128, pool_dtype, device)
    write_context_kv(kv, norm, 1e-6, rope_cache(1, 128, device), positions, slots, None, out)
    got, want = out.v[0][slots].view(pool_dtype).float(), values.to(pool_dtype).float()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert not out.k[0][slots].any()


def test_values_are_copied_and_keys_rotate(device):
    kv = torch.randn(1, 1, 2, 1, 64, device=device)
    out = buffers(1, 1, 64, torch.float32, device)
    cache = rope_cache(5, 64, device)
    one, slot = torch.ones(1, 64, device=device), torch.tensor([3], device=device)
    write_context_kv(kv, one, 0.0, cache, torch.tensor([0], device=device), slot, None, out)
    torch.testing.assert_close(out.v[0][3, 0], kv[0, 0, 1, 0], rtol=0, atol=0)
    # Position 0 has no rotation, so only the norm changes the key.
    key = kv[0, 0, 0, 0]
    torch.testing.assert_close(out.k[0][3, 0], key / key.square().mean().sqrt())
    untouched = torch.ones(SLOTS, dtype=torch.bool, device=device)
    untouched[3] = False
    assert out.k[0][untouched].isnan().all()


@pytest.mark.parametrize("write", [write_context_kv, reference])
def test_rejected_rows_are_not_written(write, device):
    accept_lens, block_size = [1, 7, 8], 8
    kv = torch.randn(len(accept_lens) * block_size, 2, 2, 2, 64, device=device)
    slots = torch.randperm(SLOTS, device=device)[: kv.shape[0]]
    out = buffers(2, 2, 64, torch.float32, device)
    lens = torch.tensor(accept_lens, device=device)
    norm, positions = torch.ones(2, 64, device=device), torch.arange(kv.shape[0], device=device)
    write(kv, norm, 1e-6, rope_cache(50, 64, device), positions, slots, lens, out)
    written = {int(s) for block, n in zip(slots.view(3, 8), accept_lens) for s in block[:n]}
    for buffer in (*out.k, *out.v):
        assert {int(s) for s in (~buffer.isnan()).flatten(1).all(1).nonzero()} == written
        assert {int(s) for s in (~buffer.isnan()).flatten(1).any(1).nonzero()} == written
