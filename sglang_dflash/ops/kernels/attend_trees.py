"""Attention of drafted trees: the KV of a request is read once per tile of query rows, by as many thread blocks as its
share of the batch's KV asks for.

A tile's rows are pairs of a node and a query head of one KV head, so that few nodes fill a tensor core's tile. Tiles of
keys that are context only need no mask; those that reach the nodes are masked by the bits of ancestors.

The keys of all requests are divided into chunks of one size by a launch of its own (`split_trees`), on the GPU, which
alone knows how long requests are: a CUDA graph holds both launches, and the layers of a forward share the first. So a
long request among short ones takes no longer than its part of all keys. A request of one chunk is done with it; the
chunks of others leave parts that are merged. Rounding depends on the chunks, and with them on the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sglang_dflash.ops.kernels import pdl
from sglang_dflash.ops.kernels.split_kv import split_kv
from sglang_dflash.types import KVSplit

# Bits of an int64.
MAX_NODES = 64
# A tensor core's smallest tile, of rows and of what is summed over.
_MIN_ROWS, _MIN_COLUMNS = 16, 16
# Thread blocks that keep a multiprocessor busy.
_BLOCKS_PER_PROCESSOR = 2
# Requests among which a further chunk looks for its own at a time.
_LOOKED_AT = 128
# Numbers that a thread block merges at a time, at most so many columns and chunks of them.
_MERGED, _MERGED_COLUMNS, _MERGED_CHUNKS, _MERGE_WARPS = 4096, 128, 32, 4
# Thread blocks that merge, if these have no more rows each than that: most find nothing to do.
_MERGE_BLOCKS, _MAX_MERGED_ROWS = 2048, 8


# Of a thread block of a Hopper GPU, in bytes.
SHARED_MEMORY = 227 * 1024


@dataclass(frozen=True)
class Tile:
    """What a thread block holds at a time.

    Attributes:
        rows: pairs of a node and a head; a power of two.
        keys: of a step; a power of two.
        warps: of the thread block.
        stages: steps whose loads and products are under way at a time.
    """

    rows: int
    keys: int
    warps: int
    stages: int = 3


# By bytes of a key or a value, whichever has more, in the dtype in which they are multiplied: the first that has room.
# So chosen that registers and a Hopper GPU's shared memory hold them.
_TILES = {
    256: Tile(rows=128, keys=64, warps=8, stages=5),
    512: Tile(rows=64, keys=32, warps=8),
    1280: Tile(rows=64, keys=32, warps=8),
    2560: Tile(rows=16, keys=16, warps=8),
}
# Products of float32 numbers take no tensor cores, and many registers: few rows, and all the warps.
_FLOAT32_ROWS = 16
# Of other dtypes, four warps have registers for so many logits of a step and numbers of the output together.
_FEW_NUMBERS = 12288


@triton.jit
def _load_rows(start, FIRST: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, is_row, IS_WHOLE: tl.constexpr):
    """COLUMNS from FIRST on of rows of SIZE numbers that begin at `start`; zeros where there are none.

    With IS_WHOLE there are as many rows as places for them.
    """
    column = FIRST + tl.arange(0, COLUMNS)
    pointer = start[:, None] + column[None, :]
    if IS_WHOLE and FIRST + COLUMNS <= SIZE:
        return tl.load(pointer)
    return tl.load(pointer, mask=is_row[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def _attend(
    query,
    query_rest,
    highest,
    weight,
    total,
    k_cache,
    v_cache,
    k_stride,
    v_stride,
    slots,
    slot_map,
    node_positions,
    begin,
    end,
    context,
    row_position,
    row_bits,
    window,
    logit_scale,
    logit_cap,
    IS_CONTEXT: tl.constexpr,
    HAS_SLOT_MAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_V_IN_K: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Go through the keys from `begin` to `end`; with IS_CONTEXT they are whole tiles, and no nodes' keys.

    Logits are to the base 2. The state of a row: its `highest` logit, the `weight` of all keys relative to it, and the
    `total` of values weighted so.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    for start in tl.range(begin, end, KEYS):
        key_index = start + tl.arange(0, KEYS)
        is_key = key_index < end
        slot = tl.load(slots + key_index, mask=is_key, other=0).to(tl.int64)
        if HAS_SLOT_MAP:
            slot = tl.load(slot_map + slot, mask=is_key, other=0).to(tl.int64)
        key = _load_rows(k_cache + slot * k_stride, 0, MAIN, K, is_key, IS_CONTEXT).to(query.dtype)
        logit = tl.dot(query, tl.trans(key), input_precision="ieee")
        if REST:
            key_rest = _load_rows(k_cache + slot * k_stride, MAIN, REST, K, is_key, IS_CONTEXT).to(query.dtype)
            logit = tl.dot(query_rest, tl.trans(key_rest), logit, input_precision="ieee")

        logit *= logit_scale
        if HAS_CAP:
            # By c * tanh(x / c); the fraction is 0 where the power is infinite.
            logit = logit_cap * (1 - 2 / (1 + tl.exp2(logit * (2 * LOG2_E / logit_cap))))
        logit *= LOG2_E
        if IS_CONTEXT:
            if HAS_WINDOW:
                is_seen = row_position[:, None] - key_index[None, :] <= window
                logit = tl.where(is_seen, logit, float("-inf"))
        else:
            node = key_index - context
            bit = tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)
            is_seen = (node < 0)[None, :] | ((row_bits[:, None] >> bit[None, :] & 1) == 1)
            if HAS_WINDOW:
                is_node = is_key & (node >= 0)
                position = tl.load(node_positions + node, mask=is_node, other=0).to(tl.int32)
                position = tl.where(is_node, position, key_index)
                is_seen &= row_position[:, None] - position[None, :] <= window
            logit = tl.where(is_seen & is_key[None, :], logit, float("-inf"))

        higher = tl.maximum(highest, tl.max(logit, axis=1))
        base = higher
        if HAS_WINDOW or not IS_CONTEXT:
            # A row that has seen nothing yet.
            base = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp2(logit - base[:, None])
        shrink = tl.exp2(highest - base)
        weight = weight * shrink + tl.sum(share, axis=1)
        if IS_V_IN_K:
            value = key
        else:
            value = _load_rows(v_cache + slot * v_stride, 0, COLUMNS, V, is_key, IS_CONTEXT).to(query.dtype)
        total = tl.dot(share.to(query.dtype), value, total * shrink[:, None], input_precision="ieee")
        highest = higher
    return highest, weight, total


@triton.jit
def _chunks_of(o_indptr, request, num_nodes):
    """How many chunks a request has, and where those parts begin that others leave before it.

    Only requests of several chunks leave parts. n chunks are at most 2 * (n - 1) then, so that parts of a request begin
    at twice what the requests before it have beyond one chunk each.
    """
    before = tl.load(o_indptr + request) // num_nodes
    num_chunks = tl.load(o_indptr + request + 1) // num_nodes - before
    return num_chunks, 2 * (before - request)


@triton.jit
def _further_chunk(o_indptr, index, bs, num_nodes, LOOKED_AT: tl.constexpr):
    """Of all chunks that are not the first of their request the one at `index`: its request, and which of it it is;
    the request is `bs` where there are not so many."""
    request, chunk = index * 0, index + 1
    for start in range(0, bs, LOOKED_AT):
        other = start + tl.arange(0, LOOKED_AT)
        is_other = other < bs
        before = tl.load(o_indptr + other, mask=is_other, other=0) // num_nodes
        after = tl.load(o_indptr + other + 1, mask=is_other, other=0) // num_nodes
        # All further chunks of these requests, and of those before them, come before `index`.
        is_before = is_other & (after - other - 1 <= index)
        request += tl.sum(is_before.to(tl.int32))
        chunk -= tl.sum(tl.where(is_before, after - before - 1, 0))
    return request, chunk


@triton.jit(do_not_specialize=["bs", "num_tiles", "num_nodes"])
def _attend_trees_kernel(
    query,
    query_row_stride,
    query_head_stride,
    k_cache,
    k_stride,
    k_head_stride,
    v_cache,
    v_stride,
    v_head_stride,
    req_to_token,
    req_to_token_stride,
    req_pool_indices,
    slot_map,
    seq_lens,
    positions,
    ancestors,
    sinks,
    output,
    parts,
    sums,
    o_indptr,
    chunk_size,
    bs,
    num_tiles,
    num_nodes,
    window,
    logit_scale,
    logit_cap,
    v_scale,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_SLOT_MAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_V_IN_K: tl.constexpr,
    LOOKED_AT: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    kv_head = tl.program_id(0) % G
    # The first chunks of all requests, and behind them the others of requests that have more.
    tile, entry = tl.program_id(0) // G % num_tiles, tl.program_id(0) // G // num_tiles
    request, chunk = entry, entry * 0
    if entry >= bs:
        request, chunk = _further_chunk(o_indptr, entry - bs, bs, num_nodes, LOOKED_AT)
    if request == bs:
        return
    keys_per_chunk = tl.load(chunk_size)
    request = request.to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    node = row // (H // G)
    is_row = node < num_nodes
    head = kv_head * (H // G) + row % (H // G)
    # Of queries and outputs.
    token = request * num_nodes + node

    num_chunks, first_part = _chunks_of(o_indptr, request, num_nodes)
    context = tl.load(seq_lens + request).to(tl.int32)
    first = tl.maximum(context - window, 0) if HAS_WINDOW else 0
    begin = first + chunk * keys_per_chunk
    # Of a window, FlashInfer's split leaves out keys where a tile has fewer rows than there are nodes.
    end = tl.where(chunk == num_chunks - 1, context + num_nodes, begin + keys_per_chunk)

    pool_row = tl.load(req_pool_indices + request).to(tl.int64)
    slots = req_to_token + pool_row * req_to_token_stride
    node_positions = positions + request * num_nodes
    row_position = tl.load(node_positions + node, mask=is_row, other=0).to(tl.int32)
    row_bits = tl.load(ancestors + token, mask=is_row, other=0)
    k_cache += kv_head.to(tl.int64) * k_head_stride
    v_cache += kv_head.to(tl.int64) * v_head_stride
    query_start = query + token * query_row_stride + head.to(tl.int64) * query_head_stride
    main = _load_rows(query_start, 0, MAIN, K, is_row, False)
    rest = main
    if REST:
        rest = _load_rows(query_start, MAIN, REST, K, is_row, False)

    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS:
        # Like a key of the first chunk whose value is zero; elsewhere its weight is one of nothing.
        sink = tl.load(sinks + head, mask=is_row & (chunk == 0), other=float("-inf")).to(tl.float32)
        highest, weight = sink * LOG2_E, weight + 1
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    masked = begin
    masked += tl.maximum(tl.minimum(end, context) - begin, 0) // KEYS * KEYS
    for IS_CONTEXT in tl.static_range(1, -1, -1):
        highest, weight, total = _attend(
            main,
            rest,
            highest,
            weight,
            total,
            k_cache,
            v_cache,
            k_stride,
            v_stride,
            slots,
            slot_map,
            node_positions,
            begin if IS_CONTEXT else masked,
            masked if IS_CONTEXT else end,
            context,
            row_position,
            row_bits,
            window,
            logit_scale,
            logit_cap,
            IS_CONTEXT,
            HAS_SLOT_MAP,
            HAS_WINDOW,
            HAS_CAP,
            IS_V_IN_K,
            K,
            V,
            MAIN,
            REST,
            COLUMNS,
            KEYS,
        )
    total *= (v_scale / weight)[:, None]
    column = tl.arange(0, COLUMNS)
    is_output = is_row[:, None] & (column < V)[None, :]
    if num_chunks == 1:
        out_row = token * H + head
        tl.store(output + out_row[:, None] * V + column[None, :], total.to(output.dtype.element_ty), mask=is_output)
    else:
        out_row = ((first_part + chunk).to(tl.int64) * num_nodes + node) * H + head
        tl.store(sums + out_row, highest + tl.log2(weight), mask=is_row)
        tl.store(parts + out_row[:, None] * V + column[None, :], total, mask=is_output)


@triton.jit(do_not_specialize=["num_nodes"])
def _merge_parts_kernel(
    parts,
    sums,
    output,
    o_indptr,
    num_nodes,
    H: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # Launched while the parts are still computed. Where there are none too: what is launched behind this kernel
        # waits for it alone.
        gdc_wait()
    request = tl.program_id(0)
    num_chunks, first_part = _chunks_of(o_indptr, request, num_nodes)
    if num_chunks == 1:
        return
    num_rows = num_nodes * H
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < num_rows, column < V
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, num_chunks, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        part_row = (first_part + chunk).to(tl.int64)[None, :] * num_rows + row[:, None]
        is_part = is_row[:, None] & (chunk < num_chunks)[None, :]
        log_sum = tl.load(sums + part_row, mask=is_part, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(log_sum, axis=1))
        # A row that has seen nothing yet.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp2(log_sum - base[:, None])
        shrink = tl.exp2(highest - base)
        # A chunk of which a row saw nothing has left no numbers in its part.
        is_number = (log_sum > float("-inf"))[:, :, None] & is_column[None, None, :]
        part = tl.load(parts + part_row[:, :, None] * V + column[None, None, :], mask=is_number, other=0.0)
        total = total * shrink[:, None] + tl.sum(part * share[:, :, None], axis=1)
        weight = weight * shrink + tl.sum(share, axis=1)
        highest = higher
    total /= weight[:, None]
    out_row = request.to(tl.int64) * num_rows + row
    is_output = is_row[:, None] & is_column[None, :]
    tl.store(output + out_row[:, None] * V + column[None, :], total.to(output.dtype.element_ty), mask=is_output)


@cache
def _num_processors(device: torch.device) -> int:
    # In Triton's interpreter, and for a GPU that is not there, as many as an H100 has.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _tile(num_rows: int, size: int, value_size: int, dtype: torch.dtype) -> Tile:
    """For rows of one KV head of a request, keys and values of at most `size` numbers, and values padded to others."""
    tile = next(tile for num_bytes, tile in _TILES.items() if size * dtype.itemsize <= num_bytes)
    if dtype == torch.float32:
        return replace(tile, rows=_FLOAT32_ROWS)
    rows = min(tile.rows, max(_MIN_ROWS, triton.next_power_of_2(num_rows)))
    return replace(tile, rows=rows, warps=4 if rows * (tile.keys + value_size) <= _FEW_NUMBERS else tile.warps)


@dataclass(frozen=True)
class _Layout:
    """How rows and numbers are cut: MAIN, REST and COLUMNS of the kernel, the tile, and a request's number of them."""

    main: int
    rest: int
    columns: int
    tile: Tile
    num_tiles: int

    @classmethod
    def of(
        cls, num_nodes: int, heads: int, kv_heads: int, key_size: int, value_size: int, dtype: torch.dtype
    ) -> _Layout:
        # A power of two, and the rest of a key.
        main = max(_MIN_COLUMNS, 1 << key_size.bit_length() - 1)
        rest = 0 if key_size <= main else max(_MIN_COLUMNS, triton.next_power_of_2(key_size - main))
        columns = max(_MIN_COLUMNS, triton.next_power_of_2(value_size))
        num_rows = num_nodes * (heads // kv_heads)
        tile = _tile(num_rows, max(main + rest, columns), columns, dtype)
        return cls(main, rest, columns, tile, triton.cdiv(num_rows, tile.rows))


def _max_entries(num_tiles: int, kv_heads: int, device: torch.device) -> int:
    """Of a batch that has so many tiles of rows.

    As many as keep the GPU busy. Batches that do that with a chunk per request get half as many more: a request much
    longer than others has chunks then, and requests of one length, whose chunks would gain nothing, still one each.
    """
    busy = max(1, _BLOCKS_PER_PROCESSOR * _num_processors(device) // kv_heads)
    return max(busy, num_tiles + busy // 2)


def split_trees(
    seq_lens: torch.Tensor,
    window: int | None,
    num_nodes: int,
    heads: int,
    kv_heads: int,
    key_size: int,
    value_size: int,
    dtype: torch.dtype,
) -> KVSplit:
    """See :func:`sglang_dflash.ops.reference.attend_trees.split_trees`."""
    bs, device = seq_lens.shape[0], seq_lens.device
    layout = _Layout.of(num_nodes, heads, kv_heads, key_size, value_size, dtype)
    num_entries = _max_entries(bs * layout.num_tiles, kv_heads, device)
    sizes = (num_entries, num_entries, num_entries, bs + 1, bs * num_nodes + 1, 1)
    requests, tiles, chunks, *others = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    is_entry = torch.empty(num_entries, dtype=torch.bool, device=device)
    split = KVSplit(requests, tiles, chunks, is_entry, *others)
    rows_per_token, tile = heads // kv_heads, layout.tile
    split_kv(seq_lens, window, num_nodes, rows_per_token, tile.rows, num_entries, tile.keys, split)
    return split


def attend_trees(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    slot_map: torch.Tensor | None,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float,
    window: int | None,
    logit_cap: float,
    sinks: torch.Tensor | None,
    k_scale: float,
    v_scale: float,
    split: KVSplit,
) -> torch.Tensor:
    """See :func:`sglang_dflash.ops.reference.attend_trees.attend_trees`."""
    (bs, num_nodes), heads, (_, kv_heads, key_size) = ancestors.shape, query.shape[1], k_cache.shape
    value_size = v_cache.shape[2]
    assert num_nodes <= MAX_NODES and query.stride(2) == k_cache.stride(2) == v_cache.stride(2) == 1
    assert req_to_token.stride(1) == 1 and ancestors.is_contiguous() and positions.is_contiguous()
    output = query.new_empty(*query.shape[:2], value_size)
    if bs == 0:
        return output
    layout = _Layout.of(num_nodes, heads, kv_heads, key_size, value_size, query.dtype)
    tile, num_entries = layout.tile, split.block_valid_mask.shape[0]
    # See `_chunks_of`.
    num_parts = 2 * max(0, num_entries // layout.num_tiles - bs)
    parts = query.new_empty(num_parts, num_nodes, heads, value_size, dtype=torch.float32)
    sums = query.new_empty(num_parts, num_nodes, heads, dtype=torch.float32)
    is_v_in_k = v_cache.data_ptr() == k_cache.data_ptr() and v_cache.stride() == k_cache.stride()
    _attend_trees_kernel[(num_entries * kv_heads,)](
        query,
        query.stride(0),
        query.stride(1),
        k_cache,
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache,
        v_cache.stride(0),
        v_cache.stride(1),
        req_to_token,
        req_to_token.stride(0),
        req_pool_indices,
        slot_map,
        seq_lens,
        positions,
        ancestors,
        sinks,
        output,
        parts,
        sums,
        split.o_indptr,
        split.kv_chunk_size,
        bs,
        layout.num_tiles,
        num_nodes,
        0 if window is None else window,
        scale * k_scale,
        logit_cap,
        v_scale,
        H=heads,
        G=kv_heads,
        K=key_size,
        V=value_size,
        MAIN=layout.main,
        REST=layout.rest,
        COLUMNS=layout.columns,
        ROWS=tile.rows,
        KEYS=tile.keys,
        HAS_SLOT_MAP=slot_map is not None,
        HAS_WINDOW=window is not None,
        HAS_CAP=logit_cap > 0,
        HAS_SINKS=sinks is not None,
        IS_V_IN_K=is_v_in_k and value_size == layout.main,
        LOOKED_AT=_LOOKED_AT,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if num_parts > 0:
        num_rows, columns = num_nodes * heads, min(layout.columns, _MERGED_COLUMNS)
        rows = min(_MAX_MERGED_ROWS, triton.next_power_of_2(triton.cdiv(bs * num_rows, _MERGE_BLOCKS)))
        pdl_is_available = pdl.is_available(query.device)
        _merge_parts_kernel[(bs, triton.cdiv(num_rows, rows), triton.cdiv(value_size, columns))](
            parts,
            sums,
            output,
            split.o_indptr,
            num_nodes,
            H=heads,
            V=value_size,
            ROWS=rows,
            CHUNKS=min(_MERGED_CHUNKS, _MERGED // (rows * columns)),
            COLUMNS=columns,
            PDL=pdl_is_available,
            num_warps=_MERGE_WARPS,
            launch_pdl=pdl_is_available,
        )
    return output
