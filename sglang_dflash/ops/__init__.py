"""Operations of a decode cycle: Triton kernels on a GPU, their torch references elsewhere.

Letters in shapes mean the same in the whole package:
    bs: requests of a batch.
    W: draft length with the bonus token, which is the width of a block.
    N: nodes of a draft tree, with the root.
    K: candidates per position.
    T: tokens.
    V: vocabulary size.
    H: hidden size.
Other dimensions are spelled out: [KV slots, kv_heads, head_dim]. A request slot is a row of SGLang's `req_to_token`.
"""

from __future__ import annotations

import torch

if torch.cuda.is_available():
    from sglang_dflash.ops.kernels.accept_paths import accept_paths
    from sglang_dflash.ops.kernels.accept_prefix import accept_prefix
    from sglang_dflash.ops.kernels.add_bigrams import add_bigrams
    from sglang_dflash.ops.kernels.add_rms_norm import add_rms_norm
    from sglang_dflash.ops.kernels.apply_penalties import apply_penalties
    from sglang_dflash.ops.kernels.argmax_product import argmax_product
    from sglang_dflash.ops.kernels.attend_trees import attend_trees, split_trees
    from sglang_dflash.ops.kernels.begin_bigrams import begin_bigrams
    from sglang_dflash.ops.kernels.block_conv import block_conv
    from sglang_dflash.ops.kernels.commit_state import commit_state
    from sglang_dflash.ops.kernels.convolve_nodes import convolve_nodes
    from sglang_dflash.ops.kernels.count_paths import count_paths
    from sglang_dflash.ops.kernels.fill_pair_table import fill_pair_table
    from sglang_dflash.ops.kernels.fill_table import fill_table
    from sglang_dflash.ops.kernels.follow_table import follow_table
    from sglang_dflash.ops.kernels.gather_window import gather_window
    from sglang_dflash.ops.kernels.grow_trees import grow_trees
    from sglang_dflash.ops.kernels.index_kv import index_kv
    from sglang_dflash.ops.kernels.linear_few_rows import linear_few_rows
    from sglang_dflash.ops.kernels.linear_int8 import linear_int8
    from sglang_dflash.ops.kernels.move_kv import move_kv
    from sglang_dflash.ops.kernels.place_copies import place_copies
    from sglang_dflash.ops.kernels.prepare_block import prepare_block
    from sglang_dflash.ops.kernels.qk_norm_rope_set_kv import qk_norm_rope_set_kv
    from sglang_dflash.ops.kernels.read_clock import read_clock
    from sglang_dflash.ops.kernels.row_max import row_max
    from sglang_dflash.ops.kernels.sample_rows import sample_rows
    from sglang_dflash.ops.kernels.shortlist_top import shortlist_top
    from sglang_dflash.ops.kernels.split_kv import split_kv
    from sglang_dflash.ops.kernels.split_rows import split_rows
    from sglang_dflash.ops.kernels.top_columns import top_columns
    from sglang_dflash.ops.kernels.verify_block import verify_block
    from sglang_dflash.ops.kernels.write_context_kv import write_context_kv
    from sglang_dflash.ops.kernels.write_texts import write_texts
else:
    from sglang_dflash.ops.reference.accept_paths import accept_paths
    from sglang_dflash.ops.reference.accept_prefix import accept_prefix
    from sglang_dflash.ops.reference.add_bigrams import add_bigrams
    from sglang_dflash.ops.reference.add_rms_norm import add_rms_norm
    from sglang_dflash.ops.reference.apply_penalties import apply_penalties
    from sglang_dflash.ops.reference.argmax_product import argmax_product
    from sglang_dflash.ops.reference.attend_trees import attend_trees, split_trees
    from sglang_dflash.ops.reference.begin_bigrams import begin_bigrams
    from sglang_dflash.ops.reference.block_conv import block_conv
    from sglang_dflash.ops.reference.commit_state import commit_state
    from sglang_dflash.ops.reference.convolve_nodes import convolve_nodes
    from sglang_dflash.ops.reference.count_paths import count_paths
    from sglang_dflash.ops.reference.fill_pair_table import fill_pair_table
    from sglang_dflash.ops.reference.fill_table import fill_table
    from sglang_dflash.ops.reference.follow_table import follow_table
    from sglang_dflash.ops.reference.gather_window import gather_window
    from sglang_dflash.ops.reference.grow_trees import grow_trees
    from sglang_dflash.ops.reference.index_kv import index_kv
    from sglang_dflash.ops.reference.linear_few_rows import linear_few_rows
    from sglang_dflash.ops.reference.linear_int8 import linear_int8
    from sglang_dflash.ops.reference.move_kv import move_kv
    from sglang_dflash.ops.reference.place_copies import place_copies
    from sglang_dflash.ops.reference.prepare_block import prepare_block
    from sglang_dflash.ops.reference.qk_norm_rope_set_kv import qk_norm_rope_set_kv
    from sglang_dflash.ops.reference.read_clock import read_clock
    from sglang_dflash.ops.reference.row_max import row_max
    from sglang_dflash.ops.reference.sample_rows import sample_rows
    from sglang_dflash.ops.reference.shortlist_top import shortlist_top
    from sglang_dflash.ops.reference.split_kv import split_kv
    from sglang_dflash.ops.reference.split_rows import split_rows
    from sglang_dflash.ops.reference.top_columns import top_columns
    from sglang_dflash.ops.reference.verify_block import verify_block
    from sglang_dflash.ops.reference.write_context_kv import write_context_kv
    from sglang_dflash.ops.reference.write_texts import write_texts

__all__ = [
    "accept_paths",
    "accept_prefix",
    "add_bigrams",
    "add_rms_norm",
    "apply_penalties",
    "argmax_product",
    "attend_trees",
    "begin_bigrams",
    "block_conv",
    "commit_state",
    "convolve_nodes",
    "count_paths",
    "fill_pair_table",
    "fill_table",
    "follow_table",
    "gather_window",
    "grow_trees",
    "index_kv",
    "linear_few_rows",
    "linear_int8",
    "move_kv",
    "place_copies",
    "prepare_block",
    "qk_norm_rope_set_kv",
    "read_clock",
    "row_max",
    "sample_rows",
    "shortlist_top",
    "split_kv",
    "split_rows",
    "split_trees",
    "top_columns",
    "verify_block",
    "write_context_kv",
    "write_texts",
]
