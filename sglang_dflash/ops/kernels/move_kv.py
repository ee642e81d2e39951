"""Move of accepted keys and values to a chain's slots, for all layers in one launch."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sglang_dflash.types import KVRows

# Bytes of a KV entry per program: 16 for each thread.
_CHUNK_BYTES = 2048
_WARPS = 4
# Nodes that are moved together. Accepted paths are seldom longer.
_ROWS = 8


@triton.jit
def _move_kv_kernel(
    pointers,
    row_bytes,
    slots,
    num_nodes,
    paths,
    max_len,
    accept_lens,
    slot_map,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ALIGNED_WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_SLOT_MAP: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    buffer = tl.program_id(1)
    accept_len = tl.load(accept_lens + request).to(tl.int32)
    row_words = tl.multiple_of(tl.load(row_bytes + buffer) // WORD_BYTES, ALIGNED_WORDS)
    words = tl.multiple_of(tl.load(pointers + buffer).to(tl.pointer_type(WORD)), ALIGNED_WORDS * WORD_BYTES)
    word = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    slots += request * num_nodes
    paths += request * max_len
    # Entries are moved in place. Paths ascend and the i-th node is at least i, so a later node is never read from a
    # slot that an earlier one was written to. The root keeps its slot.
    for start in range(1, accept_len, ROWS):
        index = start + tl.arange(0, ROWS)
        node = tl.load(paths + index, mask=index < accept_len, other=0)
        is_moved = (index < accept_len) & (node != index)
        source = tl.load(slots + node, mask=is_moved, other=0)
        target = tl.load(slots + index, mask=is_moved, other=0)
        if HAS_SLOT_MAP:
            source = tl.load(slot_map + source, mask=is_moved, other=0)
            target = tl.load(slot_map + target, mask=is_moved, other=0)
        mask = is_moved[:, None] & (word < row_words)[None, :]
        moved = tl.load(words + source[:, None] * row_words + word[None, :], mask=mask)
        # All threads must read before any writes: an earlier node may be read from a slot that a later one overwrites.
        tl.debug_barrier()
        tl.store(words + target[:, None] * row_words + word[None, :], moved, mask=mask)


def move_kv(
    rows: KVRows, slots: torch.Tensor, paths: torch.Tensor, accept_lens: torch.Tensor, slot_map: torch.Tensor | None
) -> None:
    """See :func:`sglang_dflash.ops.reference.move_kv.move_kv`."""
    bs, max_len = paths.shape
    if bs == 0:
        return
    # Sizes are read from the host's tensors: reading those on the GPU would wait for it.
    row_bytes = [buffer.nbytes // buffer.shape[0] for buffer in rows.buffers]
    aligned = math.gcd(16, *row_bytes, *(buffer.data_ptr() for buffer in rows.buffers))
    word_bytes = min(aligned, 4)
    chunk_bytes = min(_CHUNK_BYTES, triton.next_power_of_2(max(row_bytes)))
    _move_kv_kernel[(bs, len(rows.buffers), triton.cdiv(max(row_bytes), chunk_bytes))](
        rows.pointers,
        rows.row_bytes,
        slots.contiguous(),
        slots.shape[1],
        paths.contiguous(),
        max_len,
        accept_lens,
        slot_map,
        WORD={1: tl.int8, 2: tl.int16, 4: tl.int32}[word_bytes],
        WORD_BYTES=word_bytes,
        ALIGNED_WORDS=aligned // word_bytes,
        CHUNK=chunk_bytes // word_bytes,
        ROWS=min(_ROWS, triton.next_power_of_2(max_len)),
        HAS_SLOT_MAP=slot_map is not None,
        num_warps=_WARPS,
    )
