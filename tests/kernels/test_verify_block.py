from types import SimpleNamespace

import pytest
import torch
from support.random_trees import ancestors_of, chain_parents, random_parents
from torch.nn.functional import softplus

from sglang_dflash.ops.kernels.verify_block import verify_block
from sglang_dflash.ops.reference.verify_block import verify_block as reference
from sglang_dflash.recurrent.pool import comparison_bytes_per_request

# Key heads, value heads, their sizes.
SHAPES = [(1, 1, 32, 32), (2, 4, 32, 32), (2, 6, 20, 11), (1, 3, 70, 8), (1, 2, 128, 128)]


def arguments(parents, shape, dtype, device):
    """Inputs of trees, and a function that allocates what is written; parents: [n, N]."""
    n, width = parents.shape
    heads, value_heads, key_size, value_size = shape
    rows, most_nodes, num_slots = n + 2, width + 3, 2 * n + 3
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
    ancestors = ancestors_of(parents).to(device) if n else torch.zeros(0, width, dtype=torch.int64, device=device)

    def outputs():
        sizes = ((heads, key_size), (value_heads, value_size), (value_heads,))
        dtypes = (dtype, torch.float32, torch.float32)
        # Poisoned: only rows of nodes are written.
        return [torch.full((rows, most_nodes, *size), -7.0, dtype=of, device=device) for size, of in zip(sizes, dtypes)]

    return (query, key, value, a, b, a_log, dt_bias, states, slots, ancestors), outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "make_parents",
    [
        lambda: chain_parents(1, 1),
        lambda: chain_parents(3, 5),
        lambda: random_parents(2, 16, 16),
        lambda: random_parents(2, 33, 6, reach=33),
    ],
    ids=["one", "chains", "deep", "wide"],
)
def test_matches_reference(make_parents, shape, dtype, device):
    inputs, outputs = arguments(make_parents(), shape, dtype, device)
    got_kept, want_kept = outputs(), outputs()
    before = inputs[-3].clone()

    got = verify_block(*inputs, *got_kept)
    want = reference(*inputs, *want_kept)

    # The interpreter truncates to bfloat16 where a GPU rounds.
    bound = {"rtol": 2**-6, "atol": 2**-6} if dtype == torch.bfloat16 else {"rtol": 2e-5, "atol": 2e-5}
    assert got.dtype == want.dtype and got.is_contiguous()
    torch.testing.assert_close(got, want, **bound)
    for i, (mine, expected) in enumerate(zip(got_kept, want_kept)):
        # Keys to the last bit.
        torch.testing.assert_close(mine, expected, **({"rtol": 0, "atol": 0} if i == 0 else bound))
    assert torch.equal(inputs[-3], before)


def exact(parents, query, key, value, a, b, a_log, dt_bias, states, slots, ancestors):
    """Return in float64 what nodes read, [n, N, HV, V], and the states after them, [n, N, HV, V, K]: each path token by
    token."""
    a, b, a_log, dt_bias, query, key, value = (x.double() for x in (a, b, a_log, dt_bias, query, key, value))
    decay, beta = (-a_log.exp() * softplus(a + dt_bias)).exp(), b.sigmoid()
    query, key = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(value.shape[2] // x.shape[2], dim=2)
        for x in (query, key)
    )
    outputs, after = [], []
    for i, row in enumerate(parents.tolist()):
        of_nodes = []
        for t, parent in enumerate(row):
            state = of_nodes[parent] if parent >= 0 else states[slots[i].long()].double()
            state = state * decay[i, t, :, None, None]
            change = (value[i, t] - torch.einsum("hvk,hk->hv", state, key[i, t])) * beta[i, t, :, None]
            of_nodes.append(state + change[..., None] * key[i, t, :, None])
        after.append(torch.stack(of_nodes))
        outputs.append(torch.einsum("nhvk,nhk->nhv", after[-1], query[i]) * key.shape[-1] ** -0.5)
    return torch.stack(outputs), torch.stack(after)


def replayed(parents, states, slots, key, change, log_decay):
    """Return in float64 the states after all nodes, [n, N, HV, V, K], made of what was kept."""
    key, change, decay = key.double(), change.double(), log_decay.double().exp()
    key = key.repeat_interleave(change.shape[2] // key.shape[2], dim=2)
    after = []
    for i, row in enumerate(parents.tolist()):
        of_nodes = []
        for t, parent in enumerate(row):
            state = of_nodes[parent] if parent >= 0 else states[slots[i].long()].double()
            of_nodes.append(state * decay[i, t, :, None, None] + change[i, t, ..., None] * key[i, t, :, None])
        after.append(torch.stack(of_nodes))
    return torch.stack(after)


@pytest.mark.parametrize("kind", ["plain", "keys alike", "steep decays"])
@pytest.mark.parametrize("verify", [verify_block, reference])
@pytest.mark.parametrize("shape", [(2, 2, 32, 32), (2, 4, 32, 20), (1, 3, 70, 32)], ids=str)
@pytest.mark.parametrize("num_nodes", [4, 16, 33, 64])
def test_every_path_is_as_exact_as_float32(num_nodes, shape, verify, kind, device):
    """Deep trees and wide ones, and a chain, in one batch.

    Where keys are alike, all tokens write to one place, over what the token before wrote. Steep decays go down to
    e^-300.
    """
    parents = torch.cat(
        [
            random_parents(1, num_nodes, num_nodes),
            random_parents(1, num_nodes, 16, reach=num_nodes),
            chain_parents(1, num_nodes),
        ]
    )
    inputs, outputs = arguments(parents, shape, torch.float32, device)
    _, key, _, a, b, a_log, dt_bias, states, slots = inputs[:9]
    if kind == "keys alike":
        key.copy_(key[:, :1] + 0.01 * torch.randn_like(key))
        b.fill_(6.0)
        a_log.fill_(-8.0)
    elif kind == "steep decays":
        a.uniform_(-20, 15)
        a_log.fill_(3.0)
        dt_bias.fill_(0.0)
    kept = outputs()

    got = verify(*inputs, *kept)

    n = len(parents)
    states_after = replayed(parents, states, slots, *(x[:n, :num_nodes] for x in kept))
    for mine, want in zip((got, states_after), exact(parents, *inputs)):
        assert (mine - want).abs().max() < 1e-5 * want.abs().max()


def test_no_requests(device):
    inputs, outputs = arguments(chain_parents(0, 4), SHAPES[0], torch.float32, device)
    assert verify_block(*inputs, *outputs()).shape == (0, 4, 1, 32)


@pytest.mark.parametrize("num_nodes", [5, 16, 33])
def test_buffers_are_counted(monkeypatch, num_nodes, device):
    """The server's memory budget has the buffers between the two launches."""
    shape, allocated, empty = SHAPES[1], [], torch.empty

    def count(*sizes, **options):
        tensor = empty(*sizes, **options)
        allocated.append(tensor.nbytes)
        return tensor

    inputs, outputs = arguments(chain_parents(2, num_nodes), shape, torch.float32, device)
    kept = outputs()
    monkeypatch.setattr(torch, "empty", count)
    output = verify_block(*inputs, *kept)

    cache_params = SimpleNamespace(shape=SimpleNamespace(temporal=(shape[1], shape[3], shape[2])))
    per_request = comparison_bytes_per_request(cache_params, num_nodes)
    assert sum(allocated) - output.nbytes == 2 * per_request
