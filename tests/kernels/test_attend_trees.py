import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_dflash.ops.kernels import attend_trees as kernel
from sglang_dflash.ops.kernels.attend_trees import attend_trees, split_trees
from sglang_dflash.ops.reference.attend_trees import attend_trees as reference
from sglang_dflash.types import KeyChunks

# Triton's interpreter multiplies the bits of bfloat16 numbers as if they were integers.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
# Weights are rounded to the dtype before they are multiplied with values, and so are outputs.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
CONTEXTS = (65, 0, 300, 1, 64, 63)
# Fewest keys of a chunk, before rounding.
MIN_CHUNK = 64
# Query heads, KV heads, dimension of a key and of a value.
GQA = (4, 2, 32, 32)


def own_bit(node: int) -> int:
    return 1 << node if node < 63 else -(1 << 63)


def random_trees(bs: int, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return depths and ancestors, [bs, N]. The last node of every third request is padding."""
    depths, ancestors = torch.zeros(2, bs, num_nodes, dtype=torch.int64)
    for i in range(bs):
        for node in range(num_nodes):
            ancestors[i, node] = own_bit(node)
            if node and not (i % 3 == 0 and node == num_nodes - 1):
                parent = int(torch.randint(max(0, node - 3), node, ()))
                depths[i, node] = depths[i, parent] + 1
                ancestors[i, node] |= ancestors[i, parent]
    return depths, ancestors


def chains(bs: int, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    bits = torch.tensor([own_bit(node) for node in range(num_nodes)])
    return torch.arange(num_nodes).repeat(bs, 1), bits.cumsum(0).repeat(bs, 1)


def stars(bs: int, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return depths and ancestors of nodes that only see themselves."""
    bits = torch.tensor([own_bit(node) for node in range(num_nodes)])
    return torch.zeros(bs, num_nodes, dtype=torch.int64), bits.repeat(bs, 1)


def arguments(
    contexts,
    num_nodes,
    shape,
    device,
    *,
    dtype=torch.float32,
    kv_dtype=None,
    trees=random_trees,
    window=None,
    logit_cap=0.0,
    has_sinks=False,
    has_slot_map=False,
    k_scale=1.0,
    v_scale=1.0,
) -> list:
    """Return arguments of the kernel and its reference. Everything that no node may see is NaN."""
    bs, (heads, kv_heads, key_size, value_size) = len(contexts), shape
    depths, ancestors = trees(bs, num_nodes)
    seq_lens = torch.tensor(contexts)
    positions = (seq_lens[:, None] + depths).flatten()
    # The query is a view of a projection, and the cache of a wider one.
    query = torch.full((bs * num_nodes, heads + 2 * kv_heads, key_size), torch.nan)
    query[:, :heads] = torch.randn(bs * num_nodes, heads, key_size)
    width = max(contexts) + num_nodes + 5
    num_slots = (bs + 1) * width
    k_cache, v_cache = (torch.full((num_slots, kv_heads, size + 16), torch.nan) for size in (key_size, value_size))
    unseen = num_slots - 1
    slots = torch.randperm(unseen)[: bs * width].view(bs, width)
    mapped = torch.randperm(unseen) if has_slot_map else torch.arange(unseen)
    slot_map = torch.full((num_slots,), unseen)
    # A view with its own row stride, as a slice of a larger pool.
    req_to_token = torch.full((bs + 2, 2 * width), unseen, dtype=torch.int32)
    rows = torch.randperm(bs + 2)[:bs]
    for i, context in enumerate(contexts):
        first = 0 if window is None else max(0, context - window)
        seen = slots[i, first : context + num_nodes]
        req_to_token[rows[i], : context + num_nodes] = slots[i, : context + num_nodes].int()
        slot_map[seen] = mapped[seen]
        k_cache[mapped[seen], :, :key_size] = torch.randn(len(seen), kv_heads, key_size)
        v_cache[mapped[seen], :, :value_size] = torch.randn(len(seen), kv_heads, value_size)
    sinks = torch.randn(heads, device=device) if has_sinks else None
    tensors = [
        query.to(device, dtype)[:, :heads],
        k_cache.to(device, kv_dtype or dtype)[..., :key_size],
        v_cache.to(device, kv_dtype or dtype)[..., :value_size],
        req_to_token.to(device)[:, :width],
        rows.to(device),
        slot_map.to(device) if has_slot_map else None,
        *(x.to(device) for x in (seq_lens, positions, ancestors)),
    ]
    return [*tensors, key_size**-0.5, window, logit_cap, sinks, k_scale, v_scale]


def divide(inputs: list, num_chunks: int | None = None, *, merges: bool = False) -> KeyChunks:
    """Divide the keys of all requests into at most `num_chunks` chunks; None for as many as keep a GPU busy.

    With `merges`, thread blocks of attention merge their parts themselves.
    """
    query, k_cache, v_cache, _, req_pool_indices, _, seq_lens, _, ancestors = inputs[:9]
    shape = (ancestors.shape[1], query.shape[1], *k_cache.shape[1:], v_cache.shape[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_MANY", 10**6 if merges else 0)
        patch.setattr(kernel, "_MIN_CHUNK_OF_FEW", MIN_CHUNK)
        patch.setattr(kernel, "_MIN_CHUNK_OF_MANY", MIN_CHUNK)
        if num_chunks is not None:
            patch.setattr(kernel, "_max_chunks", lambda *_: num_chunks)
        split = split_trees(seq_lens, req_pool_indices, inputs[10], *shape, query.dtype)
    assert (split.arrivals is not None) == merges
    return split


def num_chunks_of(split: KeyChunks) -> list[int]:
    """Return the number of chunks of each request."""
    requests = split.chunks[:, 0]
    return requests[requests >= 0].bincount().tolist()


def check(inputs: list, num_chunks: int | None) -> torch.Tensor:
    want = reference(*inputs, None)
    tolerance = TOLERANCE[want.dtype]
    for merges in (False, True):
        split = divide(inputs, num_chunks, merges=merges)
        # Layers share the split.
        for _ in range(2 if merges else 1):
            got = attend_trees(*inputs, split)
            assert got.dtype == want.dtype and got.is_contiguous()
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    return got


# For six requests: one chunk each, or two or three for the longest.
@pytest.mark.parametrize("num_chunks", [6, 7, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_nodes", [1, 5, 16])
def test_matches_reference(num_nodes, dtype, num_chunks, device):
    check(arguments(CONTEXTS, num_nodes, GQA, device, dtype=dtype), num_chunks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_nodes", "group"), [(33, 1), (64, 1), (64, 3), (16, 7), (33, 4)])
def test_tiles_of_rows(num_nodes, group, dtype, device):
    """The tree has more rows than a tile, or groups that do not fill a tile."""
    check(arguments((200,), num_nodes, (group, 1, 16, 16), device, dtype=dtype), 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 1, 80, 80), (2, 2, 96, 64), (3, 1, 192, 128), (2, 1, 8, 24)], ids=str)
def test_sizes(shape, dtype, device):
    check(arguments((65, 130), 5, shape, device, dtype=dtype), 3)


@pytest.mark.parametrize("num_chunks", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_in_keys(dtype, num_chunks, device):
    inputs = arguments((40, 150), 3, (8, 1, 576, 512), device, dtype=dtype)
    inputs[2] = inputs[1][..., :512]
    check(inputs, num_chunks)


# Windows shorter than the depth of a tree, of one tile, and of several tiles.
@pytest.mark.parametrize("window", [2, 60, 200])
@pytest.mark.parametrize("has_slot_map", [False, True])
@pytest.mark.parametrize("num_chunks", [3, 4])
def test_window(num_chunks, has_slot_map, window, device):
    check(arguments((65, 0, 300), 16, GQA, device, window=window, has_slot_map=has_slot_map), num_chunks)


def test_more_nodes_than_rows_of_a_tile(device):
    check(arguments((300, 65), 40, GQA, device, window=200, trees=stars), 3)


@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("logit_cap", [0.0, 0.5])
@pytest.mark.parametrize("num_chunks", [3, 5])
def test_caps_and_sinks(num_chunks, logit_cap, window, device):
    inputs = arguments((0, 300, 65), 5, GQA, device, logit_cap=logit_cap, has_sinks=True, window=window)
    check(inputs, num_chunks)
    # One sink that takes all weight, and one that has none.
    inputs[-3] = torch.tensor([1000.0, -torch.inf, 0.0, -1000.0], device=device).bfloat16()
    assert not check(inputs, num_chunks)[:, 0].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_smaller_tiles_where_shared_memory_is_short(dtype, device, monkeypatch):
    """Chunks are cut by the tuned tile, and attended to by one of fewer keys."""
    monkeypatch.setattr(kernel, "_shared_memory", lambda device: 0)
    check(arguments(CONTEXTS, 16, GQA, device, dtype=dtype), 8)


@pytest.mark.parametrize("has_e4m3", [True, False])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8(dtype, kv_dtype, has_e4m3, device, monkeypatch):
    monkeypatch.setattr(kernel.fp8, "has_e4m3", lambda device: has_e4m3)
    # SGLang stores fp8 as uint8.
    inputs = arguments((0, 65, 200), 5, GQA, device, dtype=dtype, kv_dtype=kv_dtype, k_scale=0.7, v_scale=1.9)
    inputs[1:3] = (cache.view(torch.uint8).view(kv_dtype) for cache in inputs[1:3])
    check(inputs, 4)


@pytest.mark.parametrize(
    ("contexts", "window", "num_chunks", "merges"),
    [
        # Room for 33 thread blocks for each of 8 KV heads. For few requests a chunk has at least 96 keys.
        ((500,), None, [5], False),
        ((32_000,), None, [33], False),
        ((32_000,), 1000, [11], False),
        # For many requests it has at least 768.
        ((500,) * 8, None, [1] * 8, True),
        ((4000,) * 8, None, [4] * 8, True),
        ((500,) * 32, None, [1] * 32, True),
        ((500,) * 31 + (32_000,), None, [1] * 31 + [17], True),
        ((500,) * 31 + (32_000,), 1000, [1] * 32, True),
        ((500,) * 127 + (32_000,), None, [1] * 127 + [17], True),
    ],
    ids=str,
)
def test_shares_keys_evenly(contexts, window, num_chunks, merges, device, monkeypatch):
    monkeypatch.setattr(kernel, "_num_processors", lambda device: 132)
    lens, rows = torch.tensor(contexts, device=device), torch.arange(len(contexts), device=device)

    split = split_trees(lens, rows, window, 16, 32, 8, 128, 128, torch.bfloat16)

    assert num_chunks_of(split) == num_chunks
    assert (split.arrivals is not None) == merges
    _, first, end, *_ = split.chunks[split.chunks[:, 0] >= 0].T
    lens, tile = end - first, 32
    # The chunks of a request have equal lengths, except for the last.
    assert all(len(part[:-1].unique()) <= 1 for part in lens.split(num_chunks))
    assert not (torch.cat([part[:-1] for part in lens.split(num_chunks)]) % tile).any()


def test_many_chunks(device, monkeypatch):
    """One request has more chunks than are merged at a time, the other has one."""
    monkeypatch.setattr(kernel, "_MERGED_CHUNKS", 4)
    check(arguments((1200, 100), 3, GQA, device), 10)


def test_rows_merged_together(device, monkeypatch):
    monkeypatch.setattr(kernel, "_MERGE_BLOCKS", 5)
    check(arguments((300, 10, 300), 3, (3, 1, 16, 16), device), 7)


def test_no_requests(device):
    inputs = arguments((10,), 3, GQA, device)
    split = divide(inputs)
    for i in (4, 6, 7, 8, 0):
        inputs[i] = inputs[i][:0]

    assert attend_trees(*inputs, split).shape == (0, 4, 32)


@pytest.mark.parametrize("num_nodes", [16, 64])
@pytest.mark.parametrize("context", [0, 100])
def test_chain_is_causal_attention(context, num_nodes, device):
    inputs = arguments((context,), num_nodes, GQA, device, trees=chains)
    slots = inputs[3][inputs[4][0], : context + num_nodes].long()
    query, key, value = (x.transpose(0, 1)[None] for x in (inputs[0], inputs[1][slots], inputs[2][slots]))
    is_seen = torch.ones(num_nodes, context + num_nodes, dtype=torch.bool, device=device).tril(context)

    got = attend_trees(*inputs, divide(inputs))

    want = scaled_dot_product_attention(query, key, value, attn_mask=is_seen, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_nodes_of_no_path(device):
    """Each of 64 nodes sees the context and itself; the expected outputs are computed by hand."""
    inputs = arguments((3,), 64, (1, 1, 16, 16), device, trees=stars)
    query, keys, values = inputs[0][:, 0], *(x[inputs[3][inputs[4][0], :67].long(), 0] for x in inputs[1:3])

    got = attend_trees(*inputs, divide(inputs))

    for node in (0, 1, 31, 32, 62, 63):
        seen = [0, 1, 2, 3 + node]
        weights = (keys[seen] @ query[node] / math.sqrt(16)).softmax(0)
        torch.testing.assert_close(got[node, 0], weights @ values[seen], rtol=0, atol=1e-5)


@pytest.mark.parametrize("merges", [False, True])
def test_depends_on_no_other_request(merges, device):
    """A request's output is the same in every bit if its chunks are the same."""
    inputs = arguments((65, 300, 10), 5, GQA, device, dtype=torch.float16)
    alone = list(inputs)
    alone[0], alone[7] = inputs[0][5:10], inputs[7][5:10]
    for i in (4, 6, 8):
        alone[i] = inputs[i][1:2]

    splits = divide(inputs, 4, merges=merges), divide(alone, 2, merges=merges)

    # The first and last keys of the chunks.
    of_all, of_one = (split.chunks[split.chunks[:, 0] == i][:, 1:3] for i, split in ((1, splits[0]), (0, splits[1])))
    assert torch.equal(of_all, of_one) and len(of_one) == 2
    assert torch.equal(attend_trees(*inputs, splits[0])[5:10], attend_trees(*alone, splits[1]))


def test_more_nodes_than_bits(device):
    inputs = arguments((3,), 64, (1, 1, 16, 16), device, trees=stars)
    split = divide(inputs)
    inputs[8] = torch.zeros(1, 65, dtype=torch.int64, device=device)
    with pytest.raises(AssertionError):
        attend_trees(*inputs, split)
