"""The operations of a decode cycle: Triton kernels on a GPU, their torch twins elsewhere."""

from __future__ import annotations

import torch

if torch.cuda.is_available():
    from sglang_dflash.kernels.accept_prefix import accept_prefix
    from sglang_dflash.kernels.apply_penalties import apply_penalties
    from sglang_dflash.kernels.gather_window import gather_window
    from sglang_dflash.kernels.index_kv import index_kv
    from sglang_dflash.kernels.linear_few_rows import linear_few_rows
    from sglang_dflash.kernels.prepare_block import prepare_block
    from sglang_dflash.kernels.qk_norm_rope_set_kv import qk_norm_rope_set_kv
    from sglang_dflash.kernels.read_clock import read_clock
    from sglang_dflash.kernels.row_max import row_max
    from sglang_dflash.kernels.sample_rows import sample_rows
    from sglang_dflash.kernels.split_kv import split_kv
    from sglang_dflash.kernels.write_context_kv import write_context_kv
else:
    from sglang_dflash.reference.accept_prefix import accept_prefix
    from sglang_dflash.reference.apply_penalties import apply_penalties
    from sglang_dflash.reference.gather_window import gather_window
    from sglang_dflash.reference.index_kv import index_kv
    from sglang_dflash.reference.linear_few_rows import linear_few_rows
    from sglang_dflash.reference.prepare_block import prepare_block
    from sglang_dflash.reference.qk_norm_rope_set_kv import qk_norm_rope_set_kv
    from sglang_dflash.reference.read_clock import read_clock
    from sglang_dflash.reference.row_max import row_max
    from sglang_dflash.reference.sample_rows import sample_rows
    from sglang_dflash.reference.split_kv import split_kv
    from sglang_dflash.reference.write_context_kv import write_context_kv

__all__ = [
    "accept_prefix",
    "apply_penalties",
    "gather_window",
    "index_kv",
    "linear_few_rows",
    "prepare_block",
    "qk_norm_rope_set_kv",
    "read_clock",
    "row_max",
    "sample_rows",
    "split_kv",
    "write_context_kv",
]
