import pytest
import torch

from sglang_dflash.ops.kernels.verify_block import verify_block
from sglang_dflash.ops.reference.verify_block import verify_block as reference

# Key heads, value heads, their sizes.
SHAPES = [(1, 1, 32, 32), (2, 4, 32, 32), (2, 6, 20, 11), (1, 3, 70, 8), (1, 2, 128, 128)]


def arguments(n, width, shape, dtype, device):
    heads, value_heads, key_size, value_size = shape
    rows, block_size, num_slots = n + 2, width + 3, 2 * n + 3
    # Parts of one projection, as a layer has them.
    qk_size, v_size = heads * key_size, value_heads * value_size
    qkv = torch.randn(n * width, 2 * qk_size + v_size, device=device).to(dtype)
    query, key, value = qkv.split([qk_size, qk_size, v_size], 1)
    query, key = (x.view(n, width, heads, key_size) for x in (query, key))
    value = value.view(n, width, value_heads, value_size)
    # Decay from nothing to all, strength likewise.
    ba = 6 * torch.randn(n * width, 2 * value_heads, device=device).to(dtype)
    a, b = (x.view(n, width, value_heads) for x in ba.split(value_heads, 1))
    a_log, dt_bias = torch.randn(2, value_heads, device=device)
    states = torch.randn(num_slots, value_heads, value_size, key_size, device=device)
    slots = torch.randperm(num_slots, device=device)[:n].int()

    def outputs():
        sizes = ((heads, key_size), (value_heads, value_size), (value_heads,))
        dtypes = (dtype, torch.float32, torch.float32)
        # Poisoned: nothing but the block is written.
        return [torch.full((rows, block_size, *size), -7.0, dtype=of, device=device) for size, of in zip(sizes, dtypes)]

    return (query, key, value, a, b, a_log, dt_bias, states, slots), outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("n", "width"), [(1, 1), (3, 5), (2, 16)])
def test_matches_reference(n, width, shape, dtype, device):
    inputs, outputs = arguments(n, width, shape, dtype, device)
    got_kept, want_kept = outputs(), outputs()
    before = inputs[-2].clone()

    got = verify_block(*inputs, *got_kept)
    want = reference(*inputs, *want_kept)

    # The interpreter truncates to bfloat16 where a GPU rounds.
    bound = {"rtol": 2**-6, "atol": 2**-6} if dtype == torch.bfloat16 else {"rtol": 2e-5, "atol": 2e-5}
    assert got.dtype == want.dtype and got.is_contiguous()
    torch.testing.assert_close(got, want, **bound)
    for i, (mine, expected) in enumerate(zip(got_kept, want_kept)):
        # Keys to the last bit.
        torch.testing.assert_close(mine, expected, **({"rtol": 0, "atol": 0} if i == 0 else bound))
    assert torch.equal(inputs[-2], before)


def test_no_requests(device):
    inputs, outputs = arguments(0, 4, SHAPES[0], torch.float32, device)
    assert verify_block(*inputs, *outputs()).shape == (0, 4, 1, 32)
