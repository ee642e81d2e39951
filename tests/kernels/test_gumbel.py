import torch
import triton
import triton.language as tl

from sglang_dflash.ops import noise
from sglang_dflash.ops.kernels.gumbel import gumbel, gumbel_bound, hash_prefix

EDGES = [0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]


@triton.jit
def _gumbel_kernel(keys, positions, tokens, out, N: tl.constexpr):
    lane = tl.arange(0, N)
    prefix = hash_prefix(tl.load(keys + lane), tl.load(positions + lane))
    tl.store(out + lane, gumbel(prefix, tl.load(tokens + lane)))


@triton.jit
def _gumbel_bound_kernel(bits, out, N: tl.constexpr):
    lane = tl.arange(0, N)
    tl.store(out + lane, gumbel_bound(tl.load(bits + lane).to(tl.uint32)))


def test_matches_reference(device):
    """Keys, positions and tokens are near the ends of their ranges, and anywhere."""
    n = 1024
    keys = torch.randint(-(2**63), 2**63 - 1, (n,), device=device)
    keys[:3] = torch.tensor([0, -1, 2**63 - 1], device=device)
    positions, tokens = torch.randint(0, 2**31 - 1, (2, n), device=device)
    positions[:2], tokens[:2] = torch.tensor([0, 2**31 - 1]), torch.tensor([2**31 - 1, 0])
    out = torch.empty(n, device=device)
    _gumbel_kernel[(1,)](keys, positions, tokens, out, N=n)
    torch.testing.assert_close(out, noise.gumbel(keys, positions, tokens), rtol=1e-5, atol=3e-6)


def test_bound_is_just_above_the_noise(monkeypatch, device):
    """It is below noise nowhere, and where noise is large, 0.06 above it at most. The largest hashes may have more."""
    hashes = torch.randint(0, 2**32, (2**12,), dtype=torch.int64)
    # Half of the hashes have large noise, down to the smallest distances from 2^32.
    distances = (2 ** (32 * torch.rand(2**12, dtype=torch.float64))).to(torch.int64)
    hashes = torch.cat((hashes, 2**32 - distances.clamp(1, 2**32), torch.tensor(EDGES)))
    padded = torch.zeros(2**14, dtype=torch.int64)
    padded[: len(hashes)] = hashes
    bounds = torch.empty(len(padded), device=device)
    _gumbel_bound_kernel[(1,)](padded.to(device), bounds, N=len(padded))
    monkeypatch.setattr(noise, "hash_words", lambda keys, positions, tokens: tokens)
    excess = bounds.cpu() - noise.gumbel(padded, padded, padded)
    assert excess.min() > -1e-4
    is_large = (padded > 2**32 - 2**24) & (padded < 2**32 - 2**14)
    assert excess[is_large].max() < 0.08


def test_hash_is_murmur():
    """The hash is MurmurHash3 (x86, 32 bits) of the words' 16 bytes in little-endian order, seed 0."""
    rotate = lambda x, r: (x << r | x >> (32 - r)) & 0xFFFFFFFF  # noqa: E731
    key, position, token = 0x0123456789ABCDEF, 4711, 151935
    state = 0
    for word in (key & 0xFFFFFFFF, key >> 32, position, token):
        word = rotate(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        state = rotate(state ^ word, 13) * 5 + 0xE6546B64 & 0xFFFFFFFF
    state ^= 16
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        state = (state ^ state >> shift) * factor & 0xFFFFFFFF
    state ^= state >> 16
    words = (torch.tensor(value) for value in (key, position, token))
    assert noise.hash_words(*words).item() == state


def test_every_hash_has_a_finite_noise(monkeypatch):
    """To five digits -log(-log(u)); of the largest hash that of the one below it, of the smallest that of a half."""
    monkeypatch.setattr(noise, "hash_words", lambda keys, positions, tokens: tokens)
    hashes = torch.tensor([*EDGES, 2**32 - 2**26, 2**32 - 2**26 - 1])
    got = noise.gumbel(hashes, hashes, hashes)
    uniforms = (hashes.double().clamp(min=0.5) + 1) / 2**32
    uniforms[hashes < 2**31] = hashes[hashes < 2**31].double().clamp(min=0.5) / 2**32
    want = -(-uniforms.clamp(max=1 - 2.0**-32).log()).log()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_noise_is_gumbel():
    """A draw by the largest noise is uniform, over tokens, positions and keys."""
    n, columns = 20_000, 7
    index, tokens = torch.arange(n)[:, None], torch.arange(columns)
    fixed = torch.full((n, 1), 12345)
    for keys, positions in ((fixed, index), (index, fixed)):
        counts = noise.gumbel(keys, positions, tokens).argmax(dim=1).bincount(minlength=columns)
        assert ((counts - n / columns) ** 2 / (n / columns)).sum() < 26
