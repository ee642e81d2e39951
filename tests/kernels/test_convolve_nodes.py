import pytest
import torch
from support.random_trees import chain_parents, paths_to_nodes, random_parents
from torch.nn.functional import conv1d, silu

from sglang_dflash.ops.kernels.convolve_nodes import convolve_nodes
from sglang_dflash.ops.reference.convolve_nodes import convolve_nodes as reference

CONVOLUTIONS = [convolve_nodes, reference]
TREES = {
    "one": lambda: chain_parents(1, 1),
    "chains": lambda: chain_parents(3, 5),
    "4": lambda: random_parents(3, 4, 4),
    "16": lambda: random_parents(3, 16, 16),
    "33": lambda: random_parents(2, 33, 6, reach=33),
    "64": lambda: random_parents(2, 64, 64),
}


def arguments(parents, channels, places, dtype, has_bias, device):
    """The inputs of a layer, a part of a wider projection, and a function that allocates what is written."""
    n, num_nodes = parents.shape
    inputs = torch.randn(n, num_nodes, channels + 7, device=device).to(dtype)[..., :channels]
    states = torch.randn(2 * n + 3, channels, places, device=device).to(dtype)
    slots = torch.randperm(2 * n + 3, device=device)[:n].int()
    weight = torch.randn(channels, places + 1, device=device).to(dtype)
    bias = torch.randn(channels, device=device).to(dtype) if has_bias else None

    def window():
        # Poisoned: only rows of nodes are written.
        return torch.full((n + 1, num_nodes + 2, channels), -7.0, dtype=dtype, device=device)

    return (inputs, states, slots, parents.to(device), weight, bias), window


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("channels", "places"), [(5, 3), (200, 3), (70, 2)])
@pytest.mark.parametrize("trees", TREES)
def test_matches_reference(trees, channels, places, dtype, device):
    inputs, window = arguments(TREES[trees](), channels, places, dtype, has_bias=places == 2, device=device)
    got_window, want_window, before = window(), window(), inputs[1].clone()

    got, want = convolve_nodes(*inputs, got_window), reference(*inputs, want_window)

    assert got.dtype == dtype and got.is_contiguous()
    # The interpreter truncates every product to bfloat16 where a GPU rounds.
    bound = {"rtol": 2**-6, "atol": 2**-4} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got, want, **bound)
    assert torch.equal(got_window, want_window)
    assert torch.equal(inputs[1], before)


@pytest.mark.parametrize("convolve", CONVOLUTIONS)
@pytest.mark.parametrize("trees", TREES)
def test_every_path_is_the_convolution_of_its_tokens(trees, convolve, device):
    parents, places = TREES[trees](), 3
    (inputs, states, slots, _, weight, bias), window = arguments(parents, 40, places, torch.float32, True, device)

    out = convolve(inputs, states, slots, parents.to(device), weight, bias, window())

    for i, row in enumerate(parents):
        for node, path in enumerate(paths_to_nodes(row)):
            tokens = torch.cat([states[slots[i].long()], inputs[i, path].T], dim=1).double()
            last = conv1d(tokens[None], weight.double()[:, None], bias.double(), groups=40)[0, :, -1]
            torch.testing.assert_close(out[i, node].double(), silu(last), rtol=1e-5, atol=1e-5)


def test_no_requests(device):
    inputs, window = arguments(chain_parents(0, 4), 5, 3, torch.float32, False, device)
    assert convolve_nodes(*inputs, window()).shape == (0, 4, 5)
