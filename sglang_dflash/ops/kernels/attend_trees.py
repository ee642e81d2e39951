"""Attention of drafted trees.

A tile's rows are pairs of a node and a query head of one KV head, so that few nodes fill a tensor core's tile. Tiles of
keys that are context only need no mask. Tiles that reach the nodes are masked by the bits of ancestors.

A launch of its own (`divide_keys`) divides the keys of all requests into chunks of about one size. It runs on the GPU,
because only the GPU knows the lengths of requests. A CUDA graph holds both launches, and the layers of a forward share
the first one. So a long request among short ones takes no longer than its share of all keys.

A request of one chunk needs no more work. The chunks of other requests leave partial results, which are merged.
Rounding depends on the chunks, and so on the whole batch. A partial result has as many bytes as dozens of keys. In a
batch that nearly keeps the GPU busy only long requests are divided, and the thread block that ends last merges them.
In a small batch there are many chunks, and one more launch that merges them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_dflash.ops.kernels import fp8, pdl
from sglang_dflash.ops.kernels.divide_keys import divide_keys
from sglang_dflash.ops.kernels.fp8 import decode_e4m3
from sglang_dflash.types import KeyChunks

# Bits of an int64.
MAX_NODES = 64
# A tensor core's smallest tile, of rows and of what is summed over.
_MIN_ROWS, _MIN_COLUMNS = 16, 16
# Thread blocks per multiprocessor that keep it busy.
_BLOCKS_PER_PROCESSOR = 2
# Requests nearly keep the GPU busy if they have one thread block for this many multiprocessors.
_MANY = 3
# Columns of `KeyChunks.chunks`.
_CHUNK_COLUMNS = 6
# Fewest keys of a chunk, up to rounding, in small batches and in batches that nearly keep the GPU busy.
_MIN_CHUNK_OF_FEW, _MIN_CHUNK_OF_MANY = 96, 768
# Numbers of partial results that a merging thread block loads into shared memory ahead.
_NUMBERS_UNDER_WAY = 16384
# Numbers that a thread block merges at a time, and the most columns and chunks of them.
_MERGED, _MERGED_COLUMNS, _MERGED_CHUNKS, _MERGE_WARPS = 4096, 128, 32, 4
# Thread blocks that merge, and the most rows of each. Most of these blocks find nothing to do.
_MERGE_BLOCKS, _MAX_MERGED_ROWS = 2048, 8


# Shared memory of one thread block of a Hopper GPU, in bytes.
SHARED_MEMORY = 227 * 1024


@dataclass(frozen=True)
class Tile:
    """Work of a thread block in one step.

    Attributes:
        rows: int, a power of two. Pairs of a node and a head.
        keys: int, a power of two. Keys of the step.
        warps: int. Warps of the thread block.
        stages: int. Steps whose loads and products are in flight at a time.
    """

    rows: int
    keys: int
    warps: int
    stages: int = 3


# By bytes of a key or a value, whichever has more, in the dtype in which they are multiplied: the first entry that is
# large enough. Tuned for the registers and the shared memory of a Hopper GPU; see `_Layout.fitting_tile` for others.
_TILES = {
    256: Tile(rows=128, keys=32, warps=8, stages=5),
    512: Tile(rows=64, keys=32, warps=8, stages=5),
    1280: Tile(rows=64, keys=32, warps=8),
    math.inf: Tile(rows=16, keys=16, warps=8),
}
# Stages of a tile where shared memory is short.
_MIN_STAGES = 3
# Rows of float32: products take no tensor cores, and many registers.
_FLOAT32_ROWS = 16
# Most logits of a step and numbers of the output, together, for which four warps have registers.
_FEW_NUMBERS = 12288


@triton.jit
def _load_rows(start, FIRST: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, is_row):
    """Load COLUMNS numbers from FIRST on, of rows of SIZE numbers that begin at `start`; zeros after the end."""
    column = FIRST + tl.arange(0, COLUMNS)
    return tl.load(start[:, None] + column[None, :], mask=is_row[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def _to_dtype(numbers, DTYPE: tl.constexpr, IS_E4M3_BYTES: tl.constexpr):
    """Convert loaded keys or values to the dtype in which they are multiplied."""
    if IS_E4M3_BYTES:
        numbers = decode_e4m3(numbers)
    return numbers.to(DTYPE)


@triton.jit
def _finite(highest):
    """Return a finite number to subtract from logits, also for rows that have seen no key yet."""
    return tl.where(highest == float("-inf"), 0.0, highest)


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
    HAS_SLOT_MAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_V_IN_K: tl.constexpr,
    IS_E4M3_BYTES: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attend to the keys from `begin` to `end`.

    Logits are to the base 2. The state of a row is its `highest` logit, the `weight` of all keys relative to it, and
    the `total` of the weighted values.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    for start in tl.range(begin, end, KEYS):
        key_index = start + tl.arange(0, KEYS)
        is_key = key_index < end
        slot = tl.load(slots + key_index, mask=is_key, other=0).to(tl.int64)
        if HAS_SLOT_MAP:
            slot = tl.load(slot_map + slot, mask=is_key, other=0).to(tl.int64)
        key = _load_rows(k_cache + slot * k_stride, 0, MAIN, K, is_key)
        key = _to_dtype(key, query.dtype, IS_E4M3_BYTES)
        logit = tl.dot(query, tl.trans(key), input_precision="ieee")
        if REST:
            key_rest = _load_rows(k_cache + slot * k_stride, MAIN, REST, K, is_key)
            key_rest = _to_dtype(key_rest, query.dtype, IS_E4M3_BYTES)
            logit = tl.dot(query_rest, tl.trans(key_rest), logit, input_precision="ieee")

        logit *= logit_scale
        if HAS_CAP:
            # By c * tanh(x / c); the fraction is 0 where the power is infinite.
            logit = logit_cap * (1 - 2 / (1 + tl.exp2(logit * (2 * LOG2_E / logit_cap))))
        logit *= LOG2_E
        position = key_index
        # Only a request's last chunk has a tile that is not full, and its last keys are the nodes'.
        if start + KEYS > context:
            node = key_index - context
            bit = tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)
            is_seen = (node < 0)[None, :] | ((row_bits[:, None] >> bit[None, :] & 1) == 1)
            logit = tl.where(is_seen & is_key[None, :], logit, float("-inf"))
            if HAS_WINDOW:
                is_node = is_key & (node >= 0)
                of_node = tl.load(node_positions + node, mask=is_node, other=0).to(tl.int32)
                position = tl.where(is_node, of_node, key_index)
        if HAS_WINDOW:
            logit = tl.where(row_position[:, None] - position[None, :] <= window, logit, float("-inf"))

        higher = tl.maximum(highest, tl.max(logit, axis=1))
        base = _finite(higher)
        share = tl.exp2(logit - base[:, None])
        shrink = tl.exp2(highest - base)
        weight = weight * shrink + tl.sum(share, axis=1)
        value = key
        if not IS_V_IN_K:
            value = _load_rows(v_cache + slot * v_stride, 0, COLUMNS, V, is_key)
            value = _to_dtype(value, query.dtype, IS_E4M3_BYTES)
        total = tl.dot(share.to(query.dtype), value, total * shrink[:, None], input_precision="ieee")
        highest = higher
    return highest, weight, total


@triton.jit
def _merge_all(
    parts,
    sums,
    first_part,
    end_part,
    num_rows,
    first_row,
    is_row,
    V: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Merge the partial results of one thread block's rows, at `first_row` of the `num_rows` rows of a part."""
    column = tl.arange(0, COLUMNS)
    is_number = is_row[:, None] & (column < V)[None, :]
    highest = tl.full(first_row.shape, float("-inf"), tl.float32)
    weight = tl.zeros(first_row.shape, tl.float32)
    total = tl.zeros(is_number.shape, tl.float32)
    for part in tl.range(first_part, end_part, num_stages=STAGES):
        row = part * num_rows + first_row
        log_sum = tl.load(sums + row, mask=is_row, other=float("-inf"), cache_modifier=".cg")
        start = parts + row[:, None] * V + column[None, :]
        number = tl.load(start, mask=is_number, other=0.0, cache_modifier=".cg")
        # A chunk of which a row saw nothing has left no numbers in its part.
        number = tl.where((log_sum > float("-inf"))[:, None], number, 0.0)
        higher = tl.maximum(highest, log_sum)
        base = _finite(higher)
        share, shrink = tl.exp2(log_sum - base), tl.exp2(highest - base)
        total = total * shrink[:, None] + number * share[:, None]
        weight = weight * shrink + share
        highest = higher
    return total / weight[:, None]


@triton.jit(do_not_specialize=["num_tiles", "num_nodes"])
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
    slot_map,
    positions,
    ancestors,
    sinks,
    output,
    parts,
    sums,
    chunks,
    part_indptr,
    arrivals,
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
    IS_E4M3_BYTES: tl.constexpr,
    CHUNK_COLUMNS: tl.constexpr,
    MERGES: tl.constexpr,
    MERGE_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    kv_head = tl.program_id(0) % G
    tile, index = tl.program_id(0) // G % num_tiles, tl.program_id(0) // G // num_tiles
    chunk = chunks + index * CHUNK_COLUMNS
    request, begin, end = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    part, context, pool_row = tl.load(chunk + 3), tl.load(chunk + 4), tl.load(chunk + 5).to(tl.int64)
    if request < 0:
        return
    if PDL:
        # Launched while the kernel before this one still runs. The chunks were there before that one began; see
        # `split_trees`.
        gdc_wait()
        gdc_launch_dependents()
    request = request.to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    node = row // (H // G)
    is_row = node < num_nodes
    head = kv_head * (H // G) + row % (H // G)
    # Of queries and outputs.
    token = request * num_nodes + node

    slots = req_to_token + pool_row * req_to_token_stride
    node_positions = positions + request * num_nodes
    row_position = tl.load(node_positions + node, mask=is_row, other=0).to(tl.int32)
    row_bits = tl.load(ancestors + token, mask=is_row, other=0)
    k_cache += kv_head.to(tl.int64) * k_head_stride
    v_cache += kv_head.to(tl.int64) * v_head_stride
    query_start = query + token * query_row_stride + head.to(tl.int64) * query_head_stride
    main = _load_rows(query_start, 0, MAIN, K, is_row)
    rest = main
    if REST:
        rest = _load_rows(query_start, MAIN, REST, K, is_row)

    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS:
        # Like a key of the first chunk whose value is zero; elsewhere its weight is one of nothing.
        first = tl.maximum(context - window, 0) if HAS_WINDOW else 0
        sink = tl.load(sinks + head, mask=is_row & (begin == first), other=float("-inf")).to(tl.float32)
        highest, weight = sink * LOG2_E, weight + 1
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
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
        begin,
        end,
        context,
        row_position,
        row_bits,
        window,
        logit_scale,
        logit_cap,
        HAS_SLOT_MAP,
        HAS_WINDOW,
        HAS_CAP,
        IS_V_IN_K,
        IS_E4M3_BYTES,
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
    output += (token * H + head)[:, None] * V + column[None, :]
    if part < 0:
        tl.store(output, total.to(output.dtype.element_ty), mask=is_output)
    else:
        part_row = (part.to(tl.int64) * num_nodes + node) * H + head
        tl.store(sums + part_row, highest + tl.log2(weight), mask=is_row)
        tl.store(parts + part_row[:, None] * V + column[None, :], total, mask=is_output)
        if MERGES:
            first_part, end_part = tl.load(part_indptr + request), tl.load(part_indptr + request + 1)
            # All of this block's part is written before it arrives, and others' are read after the last has.
            tl.debug_barrier()
            arrival = arrivals + (request * num_tiles + tile) * G + kv_head
            if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == end_part - first_part - 1:
                # For the next layer.
                tl.store(arrival, 0)
                num_rows = num_nodes.to(tl.int64) * H
                row = node * H + head
                total = _merge_all(parts, sums, first_part, end_part, num_rows, row, is_row, V, COLUMNS, MERGE_STAGES)
                tl.store(output, total.to(output.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["num_nodes"])
def _merge_parts_kernel(
    parts,
    sums,
    output,
    part_indptr,
    num_nodes,
    H: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # Launched while the parts are still computed. It waits also if there are none, because the next kernel waits
        # for this one only.
        gdc_wait()
        gdc_launch_dependents()
    request = tl.program_id(0)
    first_part = tl.load(part_indptr + request)
    num_chunks = tl.load(part_indptr + request + 1) - first_part
    if num_chunks == 0:
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
        base = _finite(higher)
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
    # An H100's, in Triton's interpreter and without a GPU.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def _shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a thread block can have; a Hopper GPU's where there is no GPU."""
    if device.type != "cuda":
        return SHARED_MEMORY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def _tile(num_rows: int, size: int, value_size: int, dtype: torch.dtype) -> Tile:
    """Return the tile that was tuned for a shape.

    Args:
        num_rows: rows of one KV head of a request.
        size: numbers of a key or a value, whichever has more.
        value_size: numbers of a value, padded.
    """
    tile = next(tile for num_bytes, tile in _TILES.items() if size * dtype.itemsize <= num_bytes)
    if dtype == torch.float32:
        return replace(tile, rows=_FLOAT32_ROWS)
    rows = min(tile.rows, max(_MIN_ROWS, triton.next_power_of_2(num_rows)))
    return replace(tile, rows=rows, warps=4 if rows * (tile.keys + value_size) <= _FEW_NUMBERS else tile.warps)


def _needed(tile: Tile, key_size: int, value_size: int, is_v_in_k: bool, dtype: torch.dtype) -> int:
    """Return an upper bound of the bytes of shared memory that a tile needs.

    Triton keeps the queries there, one buffer of keys and values for every two stages after the first, and logits on
    their way to the second product. tests/kernels/compile_kernels.py compares the bound with compiled kernels.

    Args:
        key_size, value_size: numbers of a key and of a value, padded.
        is_v_in_k: whether values are part of the keys.
    """
    numbers = key_size if is_v_in_k else key_size + value_size
    buffered = max(1, (tile.stages - 1) // 2) * tile.keys * numbers
    attended = (tile.rows * key_size + buffered + tile.rows * (tile.keys + 4)) * dtype.itemsize + 512
    merged = _merge_stages(tile, value_size) * tile.rows * value_size * torch.float32.itemsize + 2048
    return max(attended, merged)


def _merge_stages(tile: Tile, value_size: int) -> int:
    """Return how many parts are on their way to shared memory while a thread block merges others."""
    return _NUMBERS_UNDER_WAY // (tile.rows * value_size)


@dataclass(frozen=True)
class _Layout:
    """The division of rows and numbers among thread blocks.

    Attributes:
        main, rest, columns: int. MAIN, REST and COLUMNS of the kernel.
        tile: the tile that was tuned for the shape.
        num_tiles: int. Tiles of a request and a KV head.
    """

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

    def fitting_tile(self, is_v_in_k: bool, dtype: torch.dtype, device: torch.device) -> tuple[Tile, int]:
        """Return the tuned tile, or a smaller one where shared memory is short, and the bytes that it needs.

        A smaller tile has fewer steps in flight, or also fewer keys. Its keys divide those of the tuned one, which
        `split_trees` cuts chunks by.
        """
        fewer_stages = replace(self.tile, stages=min(self.tile.stages, _MIN_STAGES))
        for tile in (self.tile, fewer_stages, replace(fewer_stages, keys=_MIN_COLUMNS)):
            needed = _needed(tile, self.main + self.rest, self.columns, is_v_in_k, dtype)
            if needed <= _shared_memory(device):
                break
        return tile, needed


def shares_memory(k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Return whether values are the first numbers of the keys, as in latent attention."""
    return v_cache.data_ptr() == k_cache.data_ptr() and v_cache.stride() == k_cache.stride()


def shared_memory_obstacle(
    num_nodes: int,
    heads: int,
    kv_heads: int,
    key_size: int,
    value_size: int,
    dtype: torch.dtype,
    device: torch.device,
    is_v_in_k: bool,
) -> str | None:
    """Return why trees of a layer cannot be verified on this GPU, in words; None: they can.

    Args:
        num_nodes, heads, kv_heads, key_size, value_size, dtype: as of :func:`split_trees`.
        is_v_in_k: whether values are the first numbers of the keys, as in latent attention.
    """
    layout = _Layout.of(num_nodes, heads, kv_heads, key_size, value_size, dtype)
    _, needed = layout.fitting_tile(is_v_in_k and value_size == layout.main, dtype, device)
    if needed <= _shared_memory(device):
        return None
    return (
        f"heads of {key_size} and {value_size} numbers need {needed >> 10} KiB of shared memory, and this GPU has "
        f"{_shared_memory(device) >> 10}"
    )


def _max_chunks(bs: int, num_tiles: int, kv_heads: int, device: torch.device) -> int:
    """Return the most chunks of a batch.

    They are as many as keep the GPU busy. A batch that does so with one chunk per request gets half as many more: they
    go to a request that is much longer than others. Requests of one length still get one each.
    """
    busy = max(1, _BLOCKS_PER_PROCESSOR * _num_processors(device) // kv_heads)
    return max(busy, bs * num_tiles + busy // 2) // num_tiles


def split_trees(
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    window: int | None,
    num_nodes: int,
    heads: int,
    kv_heads: int,
    key_size: int,
    value_size: int,
    dtype: torch.dtype,
) -> KeyChunks:
    """See :func:`sglang_dflash.ops.reference.attend_trees.split_trees`."""
    bs, device = seq_lens.shape[0], seq_lens.device
    layout = _Layout.of(num_nodes, heads, kv_heads, key_size, value_size, dtype)
    num_blocks = bs * layout.num_tiles * kv_heads
    are_many = _MANY * num_blocks >= _num_processors(device)
    min_chunk = _MIN_CHUNK_OF_MANY if are_many else _MIN_CHUNK_OF_FEW
    max_chunks = _max_chunks(bs, layout.num_tiles, kv_heads, device)
    chunks = seq_lens.new_empty(max_chunks, _CHUNK_COLUMNS, dtype=torch.int32)
    part_indptr = seq_lens.new_empty(bs + 1, dtype=torch.int32)
    divide_keys(seq_lens, req_pool_indices, window, num_nodes, layout.tile.keys, min_chunk, chunks, part_indptr)
    # Launched after `divide_keys`, so that `divide_keys` never runs while `attend_trees` begins.
    arrivals = seq_lens.new_zeros(num_blocks, dtype=torch.int32)
    return KeyChunks(chunks, part_indptr, arrivals if are_many else None)


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
    split: KeyChunks,
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
    is_v_in_k = shares_memory(k_cache, v_cache) and value_size == layout.main
    tile, _ = layout.fitting_tile(is_v_in_k, query.dtype, query.device)
    num_chunks = split.chunks.shape[0]
    # Requests of one chunk leave no partial results. Other requests have at most twice as many as extra chunks.
    num_parts = 2 * max(0, num_chunks - bs)
    parts = query.new_empty(num_parts, num_nodes, heads, value_size, dtype=torch.float32)
    sums = query.new_empty(num_parts, num_nodes, heads, dtype=torch.float32)
    pdl_is_available = pdl.is_available(query.device)
    is_e4m3_bytes = k_cache.dtype == torch.float8_e4m3fn and not fp8.has_e4m3(query.device)
    if is_e4m3_bytes:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    _attend_trees_kernel[(num_chunks * layout.num_tiles * kv_heads,)](
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
        slot_map,
        positions,
        ancestors,
        sinks,
        output,
        parts,
        sums,
        split.chunks,
        split.part_indptr,
        split.arrivals,
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
        IS_V_IN_K=is_v_in_k,
        IS_E4M3_BYTES=is_e4m3_bytes,
        CHUNK_COLUMNS=_CHUNK_COLUMNS,
        MERGES=split.arrivals is not None,
        MERGE_STAGES=1 + _merge_stages(tile, layout.columns),
        PDL=pdl_is_available,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=pdl_is_available,
    )
    if num_parts > 0 and split.arrivals is None:
        num_rows, columns = num_nodes * heads, min(layout.columns, _MERGED_COLUMNS)
        rows = min(_MAX_MERGED_ROWS, triton.next_power_of_2(triton.cdiv(bs * num_rows, _MERGE_BLOCKS)))
        _merge_parts_kernel[(bs, triton.cdiv(num_rows, rows), triton.cdiv(value_size, columns))](
            parts,
            sums,
            output,
            split.part_indptr,
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
