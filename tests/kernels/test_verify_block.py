import pytest
import torch
from torch.nn.functional import softplus

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


def exact(query, key, value, a, b, a_log, dt_bias, states, slots):
    """Outputs, and what the tokens put into the states at keys of length 1, one by one in float64."""
    a, b, a_log, dt_bias, query, key, value = (x.double() for x in (a, b, a_log, dt_bias, query, key, value))
    decay, beta = (-a_log.exp() * softplus(a + dt_bias)).exp(), b.sigmoid()
    query, key = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(value.shape[2] // x.shape[2], dim=2)
        for x in (query, key)
    )
    state, outputs, changes = states[slots.long()].double(), [], []
    for t in range(key.shape[1]):
        state = state * decay[:, t, :, None, None]
        changes.append((value[:, t] - torch.einsum("nhvk,nhk->nhv", state, key[:, t])) * beta[:, t, :, None])
        state = state + changes[-1][..., None] * key[:, t, :, None]
        outputs.append(torch.einsum("nhvk,nhk->nhv", state, query[:, t]) * key.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), torch.stack(changes, 1)


@pytest.mark.parametrize("are_keys_alike", [False, True])
@pytest.mark.parametrize("verify", [verify_block, reference])
@pytest.mark.parametrize("width", [16, 20, 64])
def test_is_as_exact_as_float32(width, verify, are_keys_alike, device):
    """Of tokens that repeat themselves too: all write to one place, over what the one before wrote."""
    shape = (2, 4, 32, 32)
    inputs, outputs = arguments(2, width, shape, torch.float32, device)
    _, key, _, _, b, a_log = inputs[:6]
    if are_keys_alike:
        key.copy_(key[:, :1] + 0.01 * torch.randn_like(key))
        b.fill_(6.0)
        a_log.fill_(-8.0)
    kept = outputs()

    got = verify(*inputs, *kept)

    lengths = kept[0][:2, :width].square().sum(-1).add(1e-6).sqrt().repeat_interleave(2, dim=-1)
    for mine, want in zip((got, kept[1][:2, :width] * lengths[..., None]), exact(*inputs)):
        assert (mine - want).abs().max() < 1e-5 * want.abs().max()


def test_no_requests(device):
    inputs, outputs = arguments(0, 4, SHAPES[0], torch.float32, device)
    assert verify_block(*inputs, *outputs()).shape == (0, 4, 1, 32)
