"""The operators of `sgl_kernel` that SGLang imports on a CPU, in torch.

`sgl_kernel` has no CPU wheel on PyPI. :func:`sglang_dflash_cpu.platform.activate` installs this module under
that name if no real one exists. Names, arguments and in-place outputs are those of `sgl_kernel`'s CPU
build; each function names the Triton kernel of SGLang whose result it gives.

Legend: `bs` requests, `pool_len` columns of `req_to_token`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write each request's new KV slots into its row, as `mem_cache.allocation.assign_req_to_token_pool`.

    Args:
        req_pool_indices: [bs] int64, rows of `req_to_token`.
        req_to_token: [num_rows, pool_len] int32, written in columns start_offset..end_offset-1 of each row.
        start_offset: [bs] int32 or int64.
        end_offset: [bs] int32 or int64.
        out_cache_loc: [sum(end_offset - start_offset)] int64, the slots, request after request.
        pool_len: columns of `req_to_token`.
    """
    rows, columns = _ragged(req_pool_indices, start_offset, end_offset)
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Gather each request's KV slots from its row.

    As `kernels.ops.speculative.cache_locs.assign_extend_cache_locs`.

    Args:
        req_pool_indices: [bs] int64, rows of `req_to_token`.
        req_to_token: [num_rows, pool_len] int32.
        start_offset: [bs] int32 or int64.
        end_offset: [bs] int32 or int64.
        out_cache_loc: [>= sum(end_offset - start_offset)] int64, written from its start; the rest is not
            changed.
        pool_len: columns of `req_to_token`.
    """
    rows, columns = _ragged(req_pool_indices, start_offset, end_offset)
    out_cache_loc[: rows.numel()] = req_to_token[rows, columns].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    speculative_num_steps: int,
) -> None:
    """Gather `topk * speculative_num_steps` KV slots per request.

    As `kernels.ops.speculative.cache_locs.assign_draft_cache_locs_contiguous`.

    Args:
        req_pool_indices: [bs] int64, rows of `req_to_token`.
        req_to_token: [num_rows, pool_len] int32.
        seq_lens: [bs] int32 or int64, the first column gathered per request.
        out_cache_loc: [bs * topk * speculative_num_steps] int64, written.
        pool_len: columns of `req_to_token`.
        topk: branches of the draft tree.
        speculative_num_steps: depth of the draft tree.
    """
    columns = seq_lens[:, None] + torch.arange(topk * speculative_num_steps)
    out_cache_loc.copy_(req_to_token[req_pool_indices[:, None], columns].flatten())


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Copy KV rows within every layer, as `kernels.ops.kvcache.cache_move.copy_all_layer_kv_cache_tiled`.

    Args:
        data_ptrs: [num_buffers] uint64, address of each layer's K or V buffer.
        strides: [num_buffers] int64, bytes per row of each buffer.
        tgt_loc: [n] int64, rows written; n may be 0.
        src_loc: [n] int64, rows read, all of them before the first is written.
    """
    if tgt_loc.numel() == 0:
        return
    num_rows = int(torch.maximum(tgt_loc.max(), src_loc.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (num_rows * stride)).from_address(address)
        rows = torch.frombuffer(memory, dtype=torch.uint8).view(num_rows, stride)
        rows[tgt_loc] = rows[src_loc]


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """Last accepted token per request, as `kernels.ops.speculative.eagle.fill_bonus_tokens`.

    Args:
        accept_tokens: [bs * accept_stride] integer.
        accept_lens: [bs] int32, with the bonus token.
        bonus_tokens: [bs] integer, written.
        accept_stride: columns per request of `accept_tokens`.
    """
    last = torch.arange(accept_lens.numel()) * accept_stride + accept_lens - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """KV slots of the accepted rows, packed, as `kernels.ops.speculative.eagle.fill_accept_out_cache_loc`.

    Args:
        accept_index: [bs, stride] or flat, integer, indices into `out_cache_loc`; -1 where nothing was
            accepted.
        out_cache_loc: [num_rows] int64.
        accept_out_cache_loc: [accept_index.numel()] int64, written from its start; the rest is not changed.
    """
    accepted = accept_index[accept_index > -1]
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def build_tree_kernel_efficient_cpu(*args: object) -> None:
    """Imported by `speculative.eagle_utils` with the scheduler; only EAGLE's draft trees call it."""
    raise NotImplementedError("draft trees need the sgl_kernel package")


def verify_tree_greedy_cpu(*args: object) -> None:
    """Imported by `speculative.eagle_utils` with the scheduler; only EAGLE's draft trees call it."""
    raise NotImplementedError("draft trees need the sgl_kernel package")


def _ragged(req_pool_indices: Tensor, start_offset: Tensor, end_offset: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of every cell of the ranges, request after request: two [sum(end - start)] int64."""
    counts = (end_offset - start_offset).clamp(min=0).to(torch.int64)
    total = int(counts.sum())
    rows = torch.repeat_interleave(req_pool_indices.to(torch.int64), counts, output_size=total)
    first_cell = torch.cumsum(counts, 0) - counts
    columns = torch.arange(total) + torch.repeat_interleave(
        start_offset.to(torch.int64) - first_cell, counts, output_size=total
    )
    return rows, columns
