"""FlashInfer's list of KV slots, in one launch. A CUDA graph can hold it: the launch does not depend on lengths."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 1024
# Programs that write the list of one request together.
_PROGRAMS = 32


@triton.jit
def _index_kv_kernel(
    req_to_token,
    req_to_token_stride,
    req_pool_indices,
    seq_lens,
    bs,
    window,
    block_size,
    slot_map,
    kv_indptr,
    kv_indices,
    PADDED_BS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SLOT_MAP: tl.constexpr,
    TILE: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    others = tl.arange(0, PADDED_BS)
    lens = tl.load(seq_lens + others, mask=others < bs, other=0).to(tl.int64)
    seq_len = tl.load(seq_lens + request).to(tl.int64)
    context_len = seq_len
    if HAS_WINDOW:
        lens = tl.minimum(lens, window)
        context_len = tl.minimum(context_len, window)
    begin = tl.sum(tl.where(others < request, lens + block_size, 0))
    num_slots = context_len + block_size
    if part == 0:
        tl.store(kv_indptr + request + 1, (begin + num_slots).to(tl.int32))
        if request == 0:
            tl.store(kv_indptr, 0)
    row = tl.load(req_pool_indices + request).to(tl.int64)
    table = req_to_token + row * req_to_token_stride + (seq_len - context_len)
    for offset in range(part * TILE, num_slots, PROGRAMS * TILE):
        column = offset + tl.arange(0, TILE)
        valid = column < num_slots
        slot = tl.load(table + column, mask=valid, other=0)
        if HAS_SLOT_MAP:
            slot = tl.load(slot_map + slot.to(tl.int64), mask=valid, other=0).to(tl.int32)
        tl.store(kv_indices + begin + column, slot, mask=valid)


def index_kv(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    window: int | None,
    block_size: int,
    slot_map: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
) -> None:
    """See :func:`sglang_dflash.ops.reference.index_kv.index_kv`."""
    bs = seq_lens.shape[0]
    _index_kv_kernel[(bs, _PROGRAMS)](
        req_to_token,
        req_to_token.stride(0),
        req_pool_indices,
        seq_lens,
        bs,
        0 if window is None else window,
        block_size,
        slot_map,
        kv_indptr,
        kv_indices,
        PADDED_BS=triton.next_power_of_2(bs),
        HAS_WINDOW=window is not None,
        HAS_SLOT_MAP=slot_map is not None,
        TILE=_TILE,
        PROGRAMS=_PROGRAMS,
    )
