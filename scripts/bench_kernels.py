"""Time each Triton kernel of this package alone, and compare with the time that its bytes take at full bandwidth.

    python3 scripts/bench_kernels.py --out scripts/results/kernels_h100

Shapes are those of a decode cycle of Qwen3-8B with its 5-layer drafter. Recurrent layers have those of Qwen3.5-9B.
Trees have as many nodes as blocks have tokens. Launches are replayed from a CUDA graph. They alternate over up to 64
inputs, which exceed the L2 cache unless a kernel moves little. Before it is timed, a kernel is compared with its torch
reference in `sglang_dflash.ops.reference`.
Without a GPU, Triton's interpreter shows that the script works; its times have no meaning:

    TRITON_INTERPRET=1 python3 scripts/bench_kernels.py --batch 1 3 --vocab 2000 --window 64 --context 500 \\
        --out work/kernels
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from datetime import date
from pathlib import Path

import torch
import triton
from bench.machine import hardware, versions
from triton.testing import do_bench_cudagraph

from sglang_dflash.draft.shortlist import Shortlist
from sglang_dflash.ops.bigrams import TABLE_DTYPE, TABLE_SIZE, put
from sglang_dflash.ops.copies import TEXT_DTYPE, TEXT_SIZE
from sglang_dflash.ops.kernels.attend_trees import split_trees
from sglang_dflash.ops.reference.argmax_product import GROUP as COMPUTED
from sglang_dflash.ops.reference.argmax_product import quantize_randomly
from sglang_dflash.ops.reference.linear_int8 import quantize_columns
from sglang_dflash.ops.reference.shortlist_top import GROUP, Int4Copy, num_candidates
from sglang_dflash.types import (
    Block,
    BlockInputs,
    DrawParameters,
    KVBuffers,
    KVRows,
    KVSplit,
    PairVectors,
    States,
    StateSlots,
    Trees,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

BLOCK_SIZE = 16
LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 5, 32, 8, 128
TARGET_LAYERS = 36
# Per depth. Wide tables and trees have twice as many, which is the default of servers.
CANDIDATES = 8
HIDDEN, INTERMEDIATE = 4096, 12288
# Gated DeltaNet layers. More layers would not change the time of one.
KEY_HEADS, VALUE_HEADS, KEY_SIZE, CONV_PLACES, LINEAR_LAYERS = 16, 32, 128, 3, 4
# FlashInfer's split for 4 query heads per KV head on an H100.
ROWS_PER_TOKEN, ROWS_PER_TILE, MAX_ENTRIES = 4, 64, 2 * 132 // KV_HEADS
LIKELY_TOKENS = 16
# Committed tokens of a block: alternately 6 and 7.
ACCEPT_LENGTH = 6.5


@dataclass(frozen=True)
class Case:
    """One launch.

    Attributes:
        arguments: of the kernel and of its torch reference. Outputs are among them, or returned.
        num_bytes: bytes that must be read or written, each counted once.
    """

    arguments: tuple
    num_bytes: float


# --- inputs ---------------------------------------------------------------------------------------------------------


def integers(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=dtype, device=DEVICE)


def prepare_block(bs: int, args: argparse.Namespace) -> Case:
    slots = integers(10**6, bs, args.context + BLOCK_SIZE, dtype=torch.int32)
    block = Block.empty(bs, BLOCK_SIZE, DEVICE)
    inputs = (integers(args.vocab, bs), seq_lens(bs, args), rows(bs), slots, args.vocab - 1)
    # Half of the slots are in use.
    keys = integers(2**62, 2 * bs)
    return Case((*inputs, None, keys, True, None, block), bs * (8 * 8 + 4 * 4 + BLOCK_SIZE * (4 + 3 * 8)))


def accept_prefix(bs: int, args: argparse.Namespace) -> Case:
    target_tokens = integers(args.vocab, bs, BLOCK_SIZE)
    # A draft is correct if it is the target's token after the position before.
    block_tokens = target_tokens.roll(1, dims=1)
    wrong = torch.arange(BLOCK_SIZE, device=DEVICE) >= accept_lens(bs)[:, None]
    block_tokens = torch.where(wrong, -1, block_tokens)
    return Case((block_tokens, target_tokens, seq_lens(bs, args)), bs * 8 * (3 * BLOCK_SIZE + 4))


def row_max(bs: int, args: argparse.Namespace) -> Case:
    values = torch.randn(bs * BLOCK_SIZE, args.vocab, device=DEVICE).bfloat16()
    return Case((values,), values.nbytes + bs * BLOCK_SIZE * (values.itemsize + 8))


def sample_rows(bs: int, args: argparse.Namespace) -> Case:
    """Make requests with the filters that models recommend."""
    return draws(bs, args, temperature=0.7, top_k=20, top_p=0.95)


def sample_unfiltered_rows(bs: int, args: argparse.Namespace) -> Case:
    return draws(bs, args, temperature=1.0, top_k=args.vocab, top_p=1.0)


def draws(bs: int, args: argparse.Namespace, temperature: float, top_k: int, top_p: float) -> Case:
    """Make logits of a confident model: at temperature 1, three of four draws are the likeliest token."""
    num_rows = bs * BLOCK_SIZE
    logits = (2.5 * torch.randn(num_rows, args.vocab, device=DEVICE)).bfloat16()
    likely = torch.rand(num_rows, args.vocab, device=DEVICE).topk(LIKELY_TOKENS).indices
    logits.scatter_(1, likely, (24 - 1.5 * torch.arange(LIKELY_TOKENS, device=DEVICE)).bfloat16().expand(num_rows, -1))
    parameters = DrawParameters(
        torch.full((bs,), temperature, device=DEVICE),
        torch.full((bs,), top_k, dtype=torch.int32, device=DEVICE),
        torch.full((bs,), top_p, device=DEVICE),
        torch.zeros(bs, device=DEVICE),
    )
    keys, positions = integers(2**62, bs), integers(args.context, num_rows)
    maxima, tokens = logits.amax(dim=1), torch.full((num_rows,), -1, device=DEVICE)
    num_bytes = logits.nbytes + bs * (BLOCK_SIZE * (maxima.itemsize + 8) + 4 * 4)
    return Case((logits, maxima, tokens, parameters, keys, positions), num_bytes)


def apply_penalties(bs: int, args: argparse.Namespace) -> Case:
    logits = torch.randn(bs * BLOCK_SIZE, args.vocab, device=DEVICE)
    counts = integers(2, bs, args.vocab, dtype=torch.int32)
    penalties = (0.5 + torch.rand(bs, device=DEVICE) for _ in range(3))
    arguments = (logits, integers(args.vocab, bs, BLOCK_SIZE), counts, rows(bs), *penalties)
    return Case(arguments, 2 * logits.nbytes + counts.nbytes)


def top_columns(bs: int, args: argparse.Namespace) -> Case:
    num_rows = bs * (BLOCK_SIZE - 1)
    values = torch.randn(num_rows, args.vocab, device=DEVICE).bfloat16()
    return Case((values, CANDIDATES), values.nbytes + num_rows * (CANDIDATES * (4 + 8) + 4))


def fill_table(bs: int, args: argparse.Namespace) -> Case:
    return tables(bs, args, CANDIDATES)


def fill_wide_table(bs: int, args: argparse.Namespace) -> Case:
    return tables(bs, args, 2 * CANDIDATES)


def fill_chain_table(bs: int, args: argparse.Namespace) -> Case:
    return tables(bs, args, 2 * CANDIDATES, has_sums=False)


def tables(bs: int, args: argparse.Namespace, k: int, has_sums: bool = True) -> Case:
    """Fill tables of sampled requests, whose texts contain about every second pair of candidates."""
    shape = (bs, BLOCK_SIZE - 1, k)
    logits = torch.randn(shape, device=DEVICE).sort(dim=-1, descending=True).values
    candidates = integers(args.vocab, *shape)
    pairs = torch.broadcast_tensors(candidates[:, :-1, :, None], candidates[:, 1:, None, ::2])
    pair_tables = torch.zeros(bs, TABLE_SIZE, dtype=TABLE_DTYPE, device=DEVICE)
    is_real = torch.ones(1, 1, dtype=torch.bool, device=DEVICE)
    pair_tables = put(pair_tables, *(tokens.flatten(1) for tokens in pairs), is_real)
    parameters = DrawParameters.greedy(bs, DEVICE)
    parameters.top_ks.fill_(20)
    log_sums = logits.logsumexp(dim=-1) + 0.1 if has_sums else None
    inputs = (candidates, logits, log_sums)
    is_chain = torch.zeros(bs, dtype=torch.int64, device=DEVICE)
    num_bytes = sum(tensor.nbytes for tensor in tensors(inputs)) + bs * 4 * 8
    num_bytes += 2 * pairs[0].numel() * TABLE_DTYPE.itemsize + candidates.numel() * k * (4 + 1)
    # Each request has a slot of its own.
    slots = torch.arange(bs, device=DEVICE)
    return Case((*inputs, parameters, integers(2**62, bs), pair_tables, is_chain, seq_lens(bs, args), slots), num_bytes)


def fill_pair_table(bs: int, args: argparse.Namespace) -> Case:
    """Fill tables of sampled requests from a selector of rank 256 and its 16 candidates."""
    k, rank, depths = 16, 256, BLOCK_SIZE - 1
    candidates, logits = integers(args.vocab, bs, depths, k), torch.randn(bs, depths, k, device=DEVICE)
    before, after = torch.randn(2, args.vocab, rank, device=DEVICE).bfloat16().unbind()
    gates = torch.randn(bs, depths, 1, rank, device=DEVICE).bfloat16()
    vectors = PairVectors(before, after, gates.expand(-1, -1, k, -1))
    parameters = DrawParameters.greedy(bs, DEVICE)
    parameters.top_ks.fill_(20)
    tables = torch.zeros(bs, TABLE_SIZE, dtype=TABLE_DTYPE, device=DEVICE)
    is_chain = torch.zeros(bs, dtype=torch.int64, device=DEVICE)
    num_bytes = candidates.nbytes + logits.nbytes + gates.nbytes + 2 * candidates.numel() * rank * 2
    num_bytes += candidates.numel() * k * (TABLE_DTYPE.itemsize + 4 + 1)
    inputs = (integers(args.vocab, bs), candidates, logits, vectors, k, parameters, integers(2**62, bs), tables)
    return Case((*inputs, is_chain, seq_lens(bs, args), torch.arange(bs, device=DEVICE)), num_bytes)


def follow_table(bs: int, args: argparse.Namespace) -> Case:
    """Follow tables of a selector with 16 candidates."""
    k, depths = 16, BLOCK_SIZE - 1
    candidates = integers(args.vocab, bs, depths, k)
    ranks = torch.rand(bs, depths, k, k, device=DEVICE).argsort(dim=-1).to(torch.uint8)
    block = integers(args.vocab, bs, BLOCK_SIZE)
    # One rank of each row, and one candidate and one draft of each position.
    return Case((candidates, ranks, block), bs * depths * (k + 8 + 8))


def block_conv(bs: int, args: argparse.Namespace) -> Case:
    """Convolve the rows of blocks with two taps and groups of 16 channels."""
    num_rows, taps, group_size = bs * BLOCK_SIZE, 2, 16
    x = torch.randn(num_rows, HIDDEN, device=DEVICE).bfloat16()
    delta = torch.randn(num_rows, 2, taps, HIDDEN // group_size, device=DEVICE).bfloat16()
    base = torch.randn(2, taps, HIDDEN, device=DEVICE).bfloat16()
    return Case((x, delta, base, 0, BLOCK_SIZE), 2 * x.nbytes + (delta.nbytes + base.nbytes) // 2)


def grow_trees(bs: int, args: argparse.Namespace) -> Case:
    return trees_to_grow(bs, args, CANDIDATES)


def grow_wide_trees(bs: int, args: argparse.Namespace) -> Case:
    return trees_to_grow(bs, args, 2 * CANDIDATES)


def trees_to_grow(bs: int, args: argparse.Namespace, k: int) -> Case:
    """Make trees from tables of random logits."""
    shape = (bs, BLOCK_SIZE - 1, k)
    logits = torch.randn((*shape, k), device=DEVICE).sort(dim=-1, descending=True).values
    ranks = torch.rand(logits.shape, device=DEVICE).argsort(dim=-1).to(torch.uint8)
    inputs = (integers(args.vocab, bs), integers(args.vocab, *shape), logits.log_softmax(dim=-1), ranks)
    req_to_token = integers(10**6, bs, args.context + BLOCK_SIZE, dtype=torch.int32)
    trees = Trees.empty(bs, BLOCK_SIZE, DEVICE)
    is_chain = torch.zeros(bs, dtype=torch.int64, device=DEVICE)
    num_bytes = sum(tensor.nbytes for tensor in (*inputs, *vars(trees).values())) + bs * (3 * 8 + BLOCK_SIZE * 4)
    # Each request has a slot of its own.
    slots = torch.arange(bs, device=DEVICE)
    return Case((*inputs, is_chain, seq_lens(bs, args), slots, req_to_token, trees), num_bytes)


def add_bigrams(bs: int, args: argparse.Namespace) -> Case:
    """Add to texts too, as cycles of trees do."""
    tables = torch.zeros(bs, TABLE_SIZE, dtype=TABLE_DTYPE, device=DEVICE)
    tokens, lens = integers(args.vocab, bs, BLOCK_SIZE), accept_lens(bs)
    is_chain = torch.zeros(bs, dtype=torch.int64, device=DEVICE)
    texts = torch.zeros(bs, TEXT_SIZE, dtype=TEXT_DTYPE, device=DEVICE)
    num_bytes = int(lens.sum()) * (8 + TABLE_DTYPE.itemsize + TEXT_DTYPE.itemsize) + bs * 5 * 8
    of_texts = (texts, seq_lens(bs, args))
    return Case((tables, rows(bs), integers(args.vocab, bs), tokens, lens, is_chain, *of_texts), num_bytes)


def begin_bigrams(bs: int, args: argparse.Namespace) -> Case:
    """Make prompts as long as the context, at most as long as a table has entries."""
    tables = torch.zeros(bs, TABLE_SIZE, dtype=TABLE_DTYPE, device=DEVICE)
    length = min(args.context, TABLE_SIZE)
    texts = integers(args.vocab, bs, 1 + length, dtype=torch.int32)
    texts[:, 0] = length
    num_bytes = 2 * tables.nbytes + texts.nbytes + bs * 2 * 8
    return Case((tables, rows(bs), texts, integers(args.vocab, bs)), num_bytes)


def write_texts(bs: int, args: argparse.Namespace) -> Case:
    texts = torch.zeros(bs, TEXT_SIZE, dtype=TEXT_DTYPE, device=DEVICE)
    lens = accept_lens(bs)
    is_chain = torch.zeros(bs, dtype=torch.int64, device=DEVICE)
    num_bytes = int(lens.sum()) * (8 + TEXT_DTYPE.itemsize) + bs * 4 * 8
    tokens = integers(args.vocab, bs, BLOCK_SIZE)
    return Case((texts, rows(bs), seq_lens(bs, args), tokens, lens, is_chain), num_bytes)


def place_copies(bs: int, args: argparse.Namespace) -> Case:
    """Make texts whose last tokens occur before. The tokens of the copies are candidates."""
    texts = integers(args.vocab, bs, TEXT_SIZE, dtype=TEXT_DTYPE)
    slots, lens = rows(bs), seq_lens(bs, args)
    end = (lens[:, None] - torch.arange(2 * BLOCK_SIZE, device=DEVICE)) % TEXT_SIZE
    earlier = (lens[:, None] // 2 - torch.arange(2 * BLOCK_SIZE, device=DEVICE)) % TEXT_SIZE
    texts[slots[:, None], end] = texts[slots[:, None], earlier]
    shape = (bs, BLOCK_SIZE - 1, 2 * CANDIDATES)
    candidates, logits = integers(args.vocab, *shape), torch.randn(shape, device=DEVICE)
    copies = (lens[:, None] // 2 + 1 + torch.arange(BLOCK_SIZE - 1, device=DEVICE)) % TEXT_SIZE
    candidates[..., 0] = texts[slots[:, None], copies].long()
    is_chain = torch.zeros(bs, dtype=torch.int64, device=DEVICE)
    num_bytes = int(lens.clamp(max=TEXT_SIZE).sum()) * TEXT_DTYPE.itemsize + candidates.nbytes + bs * 3 * 8
    num_bytes += bs * BLOCK_SIZE * 4
    return Case((texts, slots, lens, is_chain, candidates, logits), num_bytes)


def fill_copied_table(bs: int, args: argparse.Namespace) -> Case:
    """Fill a wide table in which a copy changes one row of each position, and all of the first."""
    case = fill_wide_table(bs, args)
    places = integers(2 * CANDIDATES, bs, BLOCK_SIZE - 1, dtype=torch.int32)
    lens = 3 + integers(30, bs, dtype=torch.int32)
    return Case((*case.arguments, places, lens), case.num_bytes + places.nbytes + lens.nbytes)


def grow_from_table(bs: int, args: argparse.Namespace) -> Case:
    return tables_and_trees(bs, args, CANDIDATES)


def grow_from_wide_table(bs: int, args: argparse.Namespace) -> Case:
    return tables_and_trees(bs, args, 2 * CANDIDATES)


def tables_and_trees(bs: int, args: argparse.Namespace, k: int) -> Case:
    """Make the arguments of `fill_table`, and those of `grow_trees` but for the table."""
    table, trees = tables(bs, args, k), trees_to_grow(bs, args, k)
    bonus_tokens, _, log_probs, ranks, *of_requests = trees.arguments
    num_bytes = table.num_bytes + trees.num_bytes - log_probs.nbytes - ranks.nbytes
    return Case((table.arguments, bonus_tokens, tuple(of_requests)), num_bytes)


def grow_with_copies(bs: int, args: argparse.Namespace) -> Case:
    """Make `grow_from_wide_table` with texts whose last tokens are added and then found earlier."""
    trees, copies = grow_from_wide_table(bs, args), place_copies(bs, args)
    texts, slots, lens, is_chain, candidates, logits = copies.arguments
    accepted = accept_lens(bs)
    before = lens - accepted
    # They are in the texts already.
    places = (before[:, None] + torch.arange(1 + BLOCK_SIZE, device=DEVICE)) % TEXT_SIZE
    known = texts[slots[:, None], places].long()
    table, *of_trees = trees.arguments
    added = (table[5], slots, known[:, 0], known[:, 1:].contiguous(), accepted, is_chain, texts, before)
    arguments = (added, (texts, slots, lens, is_chain), (candidates, logits, *table[2:]), *of_trees)
    return Case(arguments, trees.num_bytes + copies.num_bytes - candidates.nbytes)


def accept_paths(bs: int, args: argparse.Namespace) -> Case:
    """Make trees in which every second node is on the accepted path."""
    target_tokens = integers(args.vocab, bs, BLOCK_SIZE)
    node = torch.arange(BLOCK_SIZE, device=DEVICE)
    parents = (node - 2).clamp(min=0).expand(bs, -1)
    is_right = (node % 2 == 0) & (node // 2 < accept_lens(bs)[:, None])
    tokens = torch.where(is_right, target_tokens.gather(1, parents), -1)
    parents = parents.where(node > 0, -1)
    num_bytes = 8 * bs * (5 * BLOCK_SIZE + 4)
    return Case((tokens, parents, target_tokens, seq_lens(bs, args), BLOCK_SIZE), num_bytes)


def count_paths(bs: int, args: argparse.Namespace) -> Case:
    """Make trees in which every second node is on the accepted path."""
    paths = (2 * torch.arange(BLOCK_SIZE // 2, device=DEVICE)).repeat(bs, 1)
    tokens = integers(args.vocab, bs, BLOCK_SIZE)
    candidates = tokens.gather(1, paths)[:, 1:, None] + torch.arange(CANDIDATES, device=DEVICE)
    counts = torch.zeros(BLOCK_SIZE + CANDIDATES, dtype=torch.int64, device=DEVICE)
    lens, is_chain = accept_lens(bs), torch.zeros(bs, dtype=torch.int64, device=DEVICE)
    num_bytes = 2 * counts.nbytes + 8 * int(lens.sum()) * (2 + CANDIDATES) + 3 * lens.nbytes
    return Case((counts, paths, lens, tokens, candidates, is_chain, 1 + rows(bs)), num_bytes)


def move_kv(bs: int, args: argparse.Namespace) -> Case:
    """Move all layers of the target, and all nodes of a path except the root."""
    num_slots = 2 * bs * BLOCK_SIZE
    shape = (2 * TARGET_LAYERS, num_slots, KV_HEADS, HEAD_DIM)
    pool = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.randperm(num_slots, device=DEVICE)[: bs * BLOCK_SIZE].view(bs, BLOCK_SIZE)
    paths = (2 * torch.arange(BLOCK_SIZE // 2, device=DEVICE)).repeat(bs, 1)
    lens = accept_lens(bs)
    num_bytes = 2 * (int(lens.sum()) - bs) * pool[:, 0].nbytes
    return Case((KVRows.of(list(pool)), slots, paths, lens, None), num_bytes)


def gather_window(bs: int, args: argparse.Namespace) -> Case:
    slots = integers(10**6, bs, args.context + BLOCK_SIZE, dtype=torch.int32)
    out = torch.zeros(bs, args.window + BLOCK_SIZE, dtype=torch.int32, device=DEVICE)
    arguments = (slots, rows(bs), seq_lens(bs, args), args.window, 1, BLOCK_SIZE, out)
    return Case(arguments, 2 * out.nbytes + bs * 3 * 8)


def index_kv(bs: int, args: argparse.Namespace) -> Case:
    slots = integers(10**6, bs, args.context + BLOCK_SIZE, dtype=torch.int32)
    lens = seq_lens(bs, args)
    kv_indptr = torch.zeros(bs + 1, dtype=torch.int32, device=DEVICE)
    kv_indices = torch.zeros(slots.numel(), dtype=torch.int32, device=DEVICE)
    arguments = (slots, rows(bs), lens, None, BLOCK_SIZE, None, kv_indptr, kv_indices)
    return Case(arguments, 2 * 4 * (int(lens.sum()) + bs * BLOCK_SIZE) + bs * (2 * 8 + 4))


def split_kv(bs: int, args: argparse.Namespace) -> Case:
    lens, tiles = seq_lens(bs, args), BLOCK_SIZE * ROWS_PER_TOKEN // ROWS_PER_TILE
    sizes = (MAX_ENTRIES + bs * tiles,) * 4 + (bs + 1, bs * BLOCK_SIZE + 1, 1)
    dtypes = [torch.int32] * 3 + [torch.bool] + [torch.int32] * 3
    split = KVSplit(*(torch.zeros(n, dtype=dtype, device=DEVICE) for n, dtype in zip(sizes, dtypes, strict=True)))
    arguments = (lens, None, BLOCK_SIZE, ROWS_PER_TOKEN, ROWS_PER_TILE, MAX_ENTRIES, split)
    return Case(arguments, lens.nbytes + sum(tensor.nbytes for tensor in vars(split).values()))


def divide_keys(bs: int, args: argparse.Namespace) -> Case:
    """Divide keys into chunks of at least 32, with room for two thread blocks per multiprocessor and KV head."""
    lens = seq_lens(bs, args)
    chunks = torch.zeros(max(MAX_ENTRIES, bs), 6, dtype=torch.int32, device=DEVICE)
    part_indptr = torch.zeros(bs + 1, dtype=torch.int32, device=DEVICE)
    arguments = (lens, rows(bs), None, BLOCK_SIZE, 32, 96, chunks, part_indptr)
    return Case(arguments, 2 * lens.nbytes + chunks.nbytes + part_indptr.nbytes)


def write_context_kv(bs: int, args: argparse.Namespace) -> Case:
    num_tokens = bs * BLOCK_SIZE
    kv = torch.randn(num_tokens, LAYERS, 2, KV_HEADS, HEAD_DIM, device=DEVICE).bfloat16()
    pool = torch.zeros(2, LAYERS, 2 * num_tokens, KV_HEADS, HEAD_DIM, dtype=kv.dtype, device=DEVICE)
    pointers = [torch.tensor([t.data_ptr() for t in side], dtype=torch.uint64, device=DEVICE) for side in pool]
    lens = accept_lens(bs)
    arguments = (
        kv,
        torch.rand(LAYERS, HEAD_DIM, device=DEVICE).bfloat16(),
        1e-6,
        torch.rand(args.context + BLOCK_SIZE, HEAD_DIM, device=DEVICE),
        integers(args.context, num_tokens),
        torch.randperm(2 * num_tokens, device=DEVICE)[:num_tokens],
        lens,
        KVBuffers(list(pool[0]), list(pool[1]), *pointers, kv.dtype),
    )
    committed = int(lens.sum())
    return Case(arguments, committed * (2 * kv[0].nbytes + 4 * HEAD_DIM + 2 * 8) + bs * 8)


def qk_norm_rope_set_kv(bs: int, args: argparse.Namespace) -> Case:
    num_tokens = bs * BLOCK_SIZE
    qkv = torch.randn(num_tokens, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, device=DEVICE).bfloat16()
    arguments = (
        qkv,
        *torch.rand(2, HEAD_DIM, device=DEVICE).bfloat16(),
        1e-6,
        torch.rand(args.context + BLOCK_SIZE, HEAD_DIM, device=DEVICE),
        integers(args.context, num_tokens),
        torch.randperm(2 * num_tokens, device=DEVICE)[:num_tokens],
        *torch.zeros(2, 2 * num_tokens, KV_HEADS, HEAD_DIM, dtype=qkv.dtype, device=DEVICE),
        False,
    )
    # Everything is read once and written once; keys and values are written twice.
    heads = 2 * Q_HEADS + 6 * KV_HEADS
    return Case(arguments, num_tokens * (heads * HEAD_DIM * qkv.itemsize + 4 * HEAD_DIM + 2 * 8))


def add_rms_norm(bs: int, args: argparse.Namespace) -> Case:
    x, residual = torch.randn(2, bs * BLOCK_SIZE, HIDDEN, device=DEVICE).bfloat16()
    weight = torch.rand(HIDDEN, device=DEVICE).bfloat16()
    return Case((x, residual, weight, 1e-6, 0.0, False), 2 * (x.nbytes + residual.nbytes) + weight.nbytes)


def linear_few_rows(bs: int, args: argparse.Namespace) -> Case:
    """Make gate_up of up to eight blocks, on one of four GPUs. It is not used for more blocks."""
    x = torch.randn(BLOCK_SIZE * min(bs, 8), HIDDEN, device=DEVICE).half()
    weight = torch.randn(2 * INTERMEDIATE // 4, HIDDEN, device=DEVICE).half() / HIDDEN**0.5
    return Case((x, weight, True), x.nbytes + weight.nbytes + len(x) * INTERMEDIATE // 4 * x.itemsize)


def linear_int8(bs: int, args: argparse.Namespace) -> Case:
    """Make gate_up of up to four blocks, on one of four GPUs. It is not used for more blocks."""
    x = torch.randn(BLOCK_SIZE * min(bs, 4), HIDDEN, device=DEVICE).half()
    weight = torch.randn(2 * INTERMEDIATE // 4, HIDDEN, device=DEVICE).half() / HIDDEN**0.5
    numbers, scales = quantize_columns(weight)
    num_bytes = x.nbytes + numbers.nbytes + scales.nbytes + len(x) * INTERMEDIATE // 4 * x.itemsize
    return Case((x, numbers, scales, True), num_bytes)


def split_rows(bs: int, args: argparse.Namespace) -> Case:
    x = torch.randn(bs * BLOCK_SIZE, HIDDEN, device=DEVICE).bfloat16()
    return Case((x,), 2 * x.nbytes + 3 * len(x) * 4)


def argmax_product(bs: int, args: argparse.Namespace) -> Case:
    """Make rows of blocks, each similar to one token. float16, as in :func:`shortlist`."""
    weight = torch.randn(args.vocab, HIDDEN, device=DEVICE).half() / HIDDEN**0.5
    x = weight[integers(args.vocab, bs * BLOCK_SIZE)] * HIDDEN**0.5 / 4
    x = (x + torch.randn_like(x)).half()
    generator = torch.Generator(DEVICE).manual_seed(0)
    numbers, scales, norms = quantize_randomly(weight, generator)
    # One group of tokens is computed for most rows.
    of_groups = len(x) * COMPUTED * HIDDEN * weight.itemsize
    num_bytes = numbers.nbytes + scales.nbytes + norms.nbytes + x.nbytes + of_groups
    return Case((x, weight, numbers, scales, norms), num_bytes)


def shortlist_top(bs: int, args: argparse.Namespace) -> Case:
    return shortlist(bs, args, has_sums=True)


def shortlist_of_chains(bs: int, args: argparse.Namespace) -> Case:
    return shortlist(bs, args, has_sums=False)


def shortlist(bs: int, args: argparse.Namespace, has_sums: bool) -> Case:
    """Make rows of blocks without the first token, each similar to tokens of different groups.

    The dtype is float16 because Triton's interpreter has no products of bfloat16.
    """
    weight = torch.randn(args.vocab, HIDDEN, device=DEVICE).half()
    # Fewer in a small vocabulary, whose other tokens would come between them.
    num_groups = -(-args.vocab // GROUP)
    k = min(2 * CANDIDATES, num_groups // 2)
    groups = torch.rand(bs, BLOCK_SIZE, num_groups, device=DEVICE).argsort(dim=-1)[..., :k]
    # The last place of a group may be empty.
    like = weight[integers(args.vocab // num_groups, *groups.shape) * num_groups + groups].float()
    # Their logits differ by 1, so that rounding does not change their order.
    logits = (3.0 * k - torch.arange(k, device=DEVICE)).expand(bs, BLOCK_SIZE, 1, -1).mT
    x = (torch.linalg.solve(like @ like.mT, logits).mT @ like).half()[:, 1:, 0]
    copy = Shortlist(weight, k).copy_for(bs * (BLOCK_SIZE - 1))
    of_rows = x.numel() * (x.itemsize + num_candidates(k, isinstance(copy, Int4Copy)) * weight.itemsize)
    return Case((x, weight, copy, k, has_sums), copy.numbers.nbytes + copy.scales.nbytes + of_rows)


def attend_trees(bs: int, args: argparse.Namespace) -> Case:
    return attention(seq_lens(bs, args))


def attend_short_trees(bs: int, args: argparse.Namespace) -> Case:
    """Make trees after one context length: 512 tokens if the longest context is 16384."""
    return attention(torch.full((bs,), args.context // 32, device=DEVICE))


def attend_one_long_tree(bs: int, args: argparse.Namespace) -> Case:
    """Make one request of twice the longest context, and short ones."""
    lens = torch.full((bs,), args.context // 32, device=DEVICE)
    lens[-1] = 2 * args.context
    return attention(lens)


def attention(lens: torch.Tensor) -> Case:
    """Make one layer with scattered KV slots. It is float16: Triton's interpreter has no products of bfloat16."""
    bs, ends = len(lens), (lens + BLOCK_SIZE).cumsum(0).tolist()
    num_slots = ends[-1]
    query = torch.randn(bs * BLOCK_SIZE, Q_HEADS, HEAD_DIM, device=DEVICE).half()
    k_cache, v_cache = torch.randn(2, num_slots, KV_HEADS, HEAD_DIM, device=DEVICE, dtype=query.dtype)
    slots = torch.zeros(bs, int(lens.max()) + BLOCK_SIZE, dtype=torch.int32, device=DEVICE)
    for row, begin, end in zip(slots, [0, *ends[:-1]], ends, strict=True):
        row[: end - begin] = torch.arange(begin, end, device=DEVICE)
    slots = torch.randperm(num_slots, device=DEVICE).int()[slots]
    nodes, ancestors = torch.arange(BLOCK_SIZE, device=DEVICE), two_chains(bs)[1]
    positions = (lens[:, None] + (nodes + 1) // 2).flatten()
    inputs = (query, k_cache, v_cache, slots, torch.arange(bs, device=DEVICE), None, lens, positions, ancestors)
    num_bytes = 2 * query.nbytes + num_slots * (k_cache[0].nbytes + v_cache[0].nbytes + slots.itemsize)
    shape = (BLOCK_SIZE, Q_HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM)
    split = split_trees(lens, inputs[4], None, *shape, query.dtype)
    return Case((*inputs, HEAD_DIM**-0.5, None, 0.0, None, 1.0, 1.0, split), num_bytes)


def verify_block(bs: int, args: argparse.Namespace) -> Case:
    """Make one layer."""
    heads = (KEY_HEADS, KEY_HEADS, VALUE_HEADS)
    qkv = torch.randn(bs, BLOCK_SIZE, sum(heads) * KEY_SIZE, device=DEVICE).bfloat16()
    parts = qkv.split([count * KEY_SIZE for count in heads], 2)
    query, key, value = (part.unflatten(2, (-1, KEY_SIZE)) for part in parts)
    a, b = torch.randn(2, bs, BLOCK_SIZE, VALUE_HEADS, device=DEVICE).bfloat16()
    a_log, dt_bias = torch.randn(2, VALUE_HEADS, device=DEVICE)
    states = torch.randn(bs + 1, VALUE_HEADS, KEY_SIZE, KEY_SIZE, device=DEVICE)
    slots = 1 + torch.randperm(bs, dtype=torch.int32, device=DEVICE)
    inputs = block_inputs(1, bs)
    kept = tuple(x[0] for x in (inputs.key, inputs.change, inputs.log_decay))
    num_bytes = states[1:].nbytes + qkv.nbytes + value.numel() * 2 + a.nbytes + b.nbytes + sum(x.nbytes for x in kept)
    _, ancestors = two_chains(bs)
    return Case((query, key, value, a, b, a_log, dt_bias, states, slots, ancestors, *kept), num_bytes)


def convolve_nodes(bs: int, args: argparse.Namespace) -> Case:
    """One layer."""
    kept = block_inputs(1, bs).conv[0]
    channels = kept.shape[2]
    inputs = torch.randn(bs, BLOCK_SIZE, channels, device=DEVICE).bfloat16()
    states = torch.randn(bs + 1, channels, CONV_PLACES, device=DEVICE).bfloat16()
    slots = 1 + torch.randperm(bs, dtype=torch.int32, device=DEVICE)
    weight = torch.randn(channels, CONV_PLACES + 1, device=DEVICE).bfloat16()
    parents, _ = two_chains(bs)
    num_bytes = 3 * inputs.nbytes + states[1:].nbytes + weight.nbytes
    return Case((inputs, states, slots, parents, weight, None, kept), num_bytes)


def commit_state(bs: int, args: argparse.Namespace) -> Case:
    inputs, lens = block_inputs(LINEAR_LAYERS, bs), accept_lens(bs)
    states = States(
        torch.randn(LINEAR_LAYERS, bs + 1, inputs.conv.shape[3], CONV_PLACES, device=DEVICE).bfloat16(),
        torch.randn(LINEAR_LAYERS, bs + 1, VALUE_HEADS, KEY_SIZE, KEY_SIZE, device=DEVICE),
    )
    current, turn = torch.arange(2 * (bs + 1), dtype=torch.int32, device=DEVICE).view(2, -1)
    slots = StateSlots(current, torch.zeros(bs + 1, 2, dtype=torch.int64, device=DEVICE), turn)
    is_due = torch.ones(1, dtype=torch.int64, device=DEVICE)
    # Every second node.
    paths = torch.arange(0, BLOCK_SIZE, 2, device=DEVICE).repeat(bs, 1)
    arguments = (states, inputs, slots, 1 + rows(bs), seq_lens(bs, args), lens, 1 << 20, is_due, paths)
    per_token = sum(x[:, 0, 0].nbytes for x in (inputs.key, inputs.change, inputs.log_decay))
    num_bytes = 2 * states.temporal[:, 1:].nbytes + 2 * states.conv[:, 1:].nbytes + int(lens.sum()) * per_token
    return Case(arguments, num_bytes)


def two_chains(bs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return parents and ancestors of trees, [bs, N] int64. The root has two chains, whose nodes alternate."""
    nodes = torch.arange(BLOCK_SIZE, device=DEVICE)
    distance = nodes[:, None] - nodes
    is_ancestor = (distance >= 0) & (distance % 2 == 0) | (nodes == 0)
    ancestors = (is_ancestor.long() << nodes).sum(1).repeat(bs, 1)
    parents = torch.where(nodes > 2, nodes - 2, torch.where(nodes > 0, 0, -1)).repeat(bs, 1)
    return parents, ancestors


def block_inputs(num_layers: int, bs: int) -> BlockInputs:
    block = (num_layers, bs, BLOCK_SIZE)
    channels = (2 * KEY_HEADS + VALUE_HEADS) * KEY_SIZE
    return BlockInputs(
        conv=torch.randn(*block, channels, device=DEVICE).bfloat16(),
        key=torch.randn(*block, KEY_HEADS, KEY_SIZE, device=DEVICE).bfloat16(),
        change=torch.randn(*block, VALUE_HEADS, KEY_SIZE, device=DEVICE),
        log_decay=-torch.rand(*block, VALUE_HEADS, device=DEVICE),
    )


def seq_lens(bs: int, args: argparse.Namespace) -> torch.Tensor:
    return torch.randint(args.context // 2, args.context, (bs,), device=DEVICE)


def rows(bs: int) -> torch.Tensor:
    return torch.randperm(bs, device=DEVICE)


def accept_lens(bs: int) -> torch.Tensor:
    return torch.arange(bs, device=DEVICE) % 2 + math.floor(ACCEPT_LENGTH)


# All kernels but `read_clock`, which moves nothing.
KERNELS: list[Callable[[int, argparse.Namespace], Case]] = [
    prepare_block,
    row_max,
    accept_prefix,
    top_columns,
    fill_table,
    fill_wide_table,
    fill_chain_table,
    fill_pair_table,
    follow_table,
    block_conv,
    grow_trees,
    grow_wide_trees,
    grow_from_table,
    grow_from_wide_table,
    grow_with_copies,
    accept_paths,
    begin_bigrams,
    add_bigrams,
    write_texts,
    place_copies,
    fill_copied_table,
    count_paths,
    move_kv,
    gather_window,
    index_kv,
    split_kv,
    divide_keys,
    qk_norm_rope_set_kv,
    write_context_kv,
    sample_rows,
    sample_unfiltered_rows,
    apply_penalties,
    add_rms_norm,
    linear_few_rows,
    linear_int8,
    split_rows,
    argmax_product,
    shortlist_top,
    shortlist_of_chains,
    attend_trees,
    attend_short_trees,
    attend_one_long_tree,
    convolve_nodes,
    verify_block,
    commit_state,
]
# Kernels of the entries that have another name.
OPERATIONS = {
    "attend_short_trees": "attend_trees",
    "attend_one_long_tree": "attend_trees",
    "shortlist_of_chains": "shortlist_top",
    "fill_wide_table": "fill_table",
    "fill_chain_table": "fill_table",
    "fill_copied_table": "fill_table",
    "grow_wide_trees": "grow_trees",
    "sample_unfiltered_rows": "sample_rows",
}


def fill_and_grow(package: str, of_table: tuple, bonus_tokens: torch.Tensor, of_trees: tuple) -> tuple:
    """Fill a table and grow trees from it, as a cycle does. Return the table."""
    table = twin("fill_table", package)(*of_table)
    twin("grow_trees", package)(bonus_tokens, of_table[0], *table, *of_trees)
    return table


def copy_and_grow(
    package: str, added: tuple, of_texts: tuple, of_table: tuple, bonus_tokens: torch.Tensor, of_trees: tuple
) -> tuple:
    """Make :func:`fill_and_grow` with copies, and add tokens.

    The kernel before `place_copies` is `grow_trees`. It lets `place_copies` begin early, as `shortlist_top` does in a
    cycle.
    """
    copies = twin("place_copies", package)(*of_texts, *of_table[:2])
    table = twin("fill_table", package)(*of_table, *copies)
    twin("add_bigrams", package)(*added)
    twin("grow_trees", package)(bonus_tokens, of_table[0], *table, *of_trees)
    return table


# Entries of several kernels.
SEQUENCES = {
    "grow_from_table": fill_and_grow,
    "grow_from_wide_table": fill_and_grow,
    "grow_with_copies": copy_and_grow,
}


@triton.jit
def _empty_kernel():
    pass


# --- check and time -------------------------------------------------------------------------------------------------


def build(make: Callable[[int, argparse.Namespace], Case], bs: int, args: argparse.Namespace, seed: int) -> Case:
    """Make the inputs of a seed, in new memory."""
    torch.manual_seed(seed)
    return make(bs, args)


def check(name: str, got: Case, want: Case) -> None:
    """Raise AssertionError unless the kernel and its torch reference have the same results, up to rounding."""
    returned = [twin(name, package)(*case.arguments) for package, case in (("kernels", got), ("reference", want))]
    mine, theirs = list(tensors((returned[0], got.arguments))), list(tensors((returned[1], want.arguments)))
    assert len(mine) == len(theirs)
    # Triton's interpreter truncates to bfloat16 where a GPU rounds. A float32 result may come from bfloat16 values.
    is_bfloat16 = any(tensor.dtype == torch.bfloat16 for tensor in theirs)
    bounds = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-7 if is_bfloat16 else 1e-5}
    for a, b in zip(mine, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, name
        bound = bounds.get(a.dtype, 0.0)
        assert (a.double() - b.double()).norm() <= bound * b.double().norm(), name


def twin(name: str, package: str) -> Callable:
    """Return an entry's function: of `ops.kernels`, or its torch reference of `ops.reference`."""
    if name in SEQUENCES:
        return functools.partial(SEQUENCES[name], package)
    name = OPERATIONS.get(name, name)
    return getattr(importlib.import_module(f"sglang_dflash.ops.{package}.{name}"), name)


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield every tensor in arguments or results, except pointers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, KVBuffers):
        yield from (*value.k, *value.v)
    elif isinstance(value, KVRows):
        yield from value.buffers
    elif is_dataclass(value):
        yield from tensors(tuple(vars(value).values()))
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors(part)


def microseconds(launch: Callable[[], object]) -> float:
    """Return the time per launch: the median over replays of a graph of launches."""
    if DEVICE == "cuda":
        return do_bench_cudagraph(launch, return_mode="median") * 1e3
    start = time.perf_counter()
    launch()
    return (time.perf_counter() - start) * 1e6


def measure(make: Callable[[int, argparse.Namespace], Case], bs: int, args: argparse.Namespace) -> dict:
    name = make.__name__
    first = build(make, bs, args, seed=0)
    check(name, build(make, bs, args, seed=0), build(make, bs, args, seed=0))
    cache = torch.cuda.get_device_properties(0).L2_cache_size if DEVICE == "cuda" else 0
    others = min(63, math.ceil(2 * cache / first.num_bytes))
    cases = itertools.cycle([first, *(build(make, bs, args, seed) for seed in range(1, others + 1))])
    kernel = twin(name, "kernels")
    us = microseconds(lambda: kernel(*next(cases).arguments))
    floor = first.num_bytes / args.bandwidth / 1e6
    return {"kernel": name, "batch": bs, "us": us, "bytes": first.num_bytes, "floor_us": floor, "ratio": us / floor}


def report(setup: dict, measured: list[dict], title: str) -> str:
    lines = [
        f"# {title}",
        "",
        f"{setup['hardware']}; {setup['versions']}.",
        "",
        f"    {setup['command']}",
        "",
        f"Block {BLOCK_SIZE}, {LAYERS} drafter layers of {KV_HEADS} KV heads of {HEAD_DIM}, {ACCEPT_LENGTH} tokens of "
        f"a block committed, vocabulary {setup['vocab']}, contexts of {setup['context'] // 2} to {setup['context']} "
        f"tokens, window {setup['window']}; trees of {BLOCK_SIZE} nodes from {BLOCK_SIZE - 1} depths of {CANDIDATES} "
        f"candidates, wide ones of {2 * CANDIDATES}, {TARGET_LAYERS} target layers; short trees follow "
        f"{setup['context'] // 32} tokens, a long one {2 * setup['context']}. Times are medians over replays of a CUDA "
        f"graph of launches, in which an empty kernel takes {setup['empty_us']:.2f} us. Bytes are those that must be "
        f"read or written, counted once; the floor is their time at {setup['bandwidth']} TB/s. Every kernel was first "
        "compared with its torch reference.",
        "",
        "| kernel | batch | us | kB | floor, us | us / floor |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['kernel']} | {row['batch']} | {row['us']:.2f} | {row['bytes'] / 1e3:.1f} | {row['floor_us']:.3f} | "
        f"{row['ratio']:.1f} |"
        for row in measured
    ]
    return "\n".join(lines) + "\n"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [make.__name__ for make in KERNELS]
    parser.add_argument("--kernels", nargs="+", choices=names, default=names, metavar="NAME", help="default: all")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--context", type=int, default=16384, help="tokens of the longest request")
    parser.add_argument("--window", type=int, default=4096, help="of a windowed drafter; at most half of --context")
    parser.add_argument("--bandwidth", type=float, default=3.35, help="of the memory, TB/s; default: H100 SXM")
    parser.add_argument("--out", type=Path, default=Path("work/kernels"), help="without suffix")
    return parser.parse_args(argv)


def main() -> None:
    args = parse(sys.argv[1:])
    setup = {
        "hardware": hardware(DEVICE),
        "versions": versions(),
        "command": f"{date.today()}: python3 scripts/bench_kernels.py {shlex.join(sys.argv[1:])}",
        "vocab": args.vocab,
        "context": args.context,
        "window": args.window,
        "bandwidth": args.bandwidth,
        "empty_us": microseconds(lambda: _empty_kernel[(1,)]()),
    }
    measured = [measure(make, bs, args) for make in KERNELS if make.__name__ in args.kernels for bs in args.batch]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{args.out}.json").write_text(json.dumps({"setup": setup, "runs": measured}) + "\n")
    text = report(setup, measured, args.out.name.replace("_", " "))
    Path(f"{args.out}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
