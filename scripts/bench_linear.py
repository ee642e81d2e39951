"""Would a GEMM of our own stream weights faster than cuBLAS, for the few rows that a cycle verifies?

    python3 scripts/bench_linear.py --out scripts/results/linear_h100

A candidate, which the package does not use: Triton, split along K where there are too few columns to fill the GPU, the
partial sums added up in order by whichever thread block comes last, or by the norm behind; for gate_up with the
activation behind it. With programmatic dependent launch (PDL) kernels start while the one before still runs, and may
fetch weights. Beside it, every
algorithm that cuBLASLt offers, of which PyTorch takes the first. Launches are replayed from a CUDA graph and take
turns over copies of the weights, more than the L2 cache holds. First each shape of Qwen3-8B alone, at one GPU and as
shards of two and four; then a layer's GEMMs with the norms between them, in the best configurations. Without a GPU,
Triton's interpreter shows that the script works and the kernel is right:

    TRITON_INTERPRET=1 python3 scripts/bench_linear.py --rows 3 --shapes 48x300 --out work/linear
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from bench import cublaslt
from bench.machine import hardware, versions
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter multiplies the bits of bfloat16 numbers as if they were integers.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32

HIDDEN, HEADS, HEAD_DIM = 4096, 32, 128
# Columns x K of a layer's qkv, o, gate_up (half its columns, as its activation leaves) and down on one, two and four
# GPUs; the context's fc and its layers' k and v; lm_head.
LAYER = ["6144x4096", "4096x4096", "12288x4096 gated", "4096x12288"]
SHARDS = ["3072x4096", "4096x2048", "6144x4096 gated", "4096x6144", "1536x4096", "4096x1024", "3072x4096 gated"]
SHAPES = [*LAYER, *SHARDS, "4096x3072", "4096x20480", "10240x4096", "151936x4096"]
# Of PyTorch; some of cuBLAS's algorithms clear memory first, which costs a CUDA graph more than it costs a stream.
LIBRARIES = ("cublas", "cublaslt")
# Of cuBLASLt's, which knows fewer for most shapes.
MOST_ALGORITHMS = 16
# Of the candidate: with more, multiplication takes longer than weights do.
MOST_ROWS = 128
# When a kernel lets the next one start: when it ends; when it starts; then, fetching its first weights while it waits
# for the one before; when nothing is left but to write its results.
PDL = ("no", "early", "fetch", "late")
# What a block of threads may have of an H100's; checked before anything is compiled.
SHARED_MEMORY = 227 * 1024


@dataclass(frozen=True)
class Config:
    """How the kernel is cut.

    Attributes:
        columns, depth: of a tile of weights.
        stages: tiles in flight.
        splits: thread blocks that share a column's K.
        tma: whether weights are loaded by the tensor memory accelerator.
    """

    columns: int
    depth: int
    stages: int
    warps: int
    splits: int
    tma: bool

    def fits(self, rows: int, is_gated: bool) -> bool:
        return self.stages * (self.columns * (1 + is_gated) + rows) * self.depth * 2 <= SHARED_MEMORY


CONFIGS = [
    Config(*values)
    for values in itertools.product((32, 64, 128), (64, 128, 256), (3, 4, 6), (4, 8), (1, 2, 3, 4, 6, 8), (False, True))
    # Fewer bytes in flight cannot keep the memory busy, whatever else is chosen.
    if values[0] * values[1] * values[2] * 2 >= 32 * 1024
]


# --- the candidate --------------------------------------------------------------------------------------------------


@triton.jit
def _load_weights(weight, descriptor, first_row, column, k, num_columns, size_k, TMA: tl.constexpr):
    if TMA:
        return descriptor.load([tl.cast(first_row, tl.int32), tl.cast(tl.min(k), tl.int32)])
    inside = (column[:, None] < num_columns) & (k[None, :] < size_k)
    return tl.load(
        weight + (first_row + tl.arange(0, column.shape[0]))[:, None] * size_k + k[None, :], mask=inside, other=0.0
    )


@triton.jit
def _prefetch(weight, first_row, column, first_k, num_columns, size_k, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """Into the L2 cache: the first two tiles of some rows of weights, a pointer for each line of 64 numbers."""
    row = first_row + tl.arange(0, COLUMNS)
    line = first_k + tl.arange(0, 2 * DEPTH // 64) * 64
    is_line = (column[:, None] < num_columns) & (line[None, :] < size_k)
    pointers = weight + tl.where(is_line, row[:, None] * size_k + line[None, :], 0)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _sum_parts(part, stride, splits, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """In order, so that the sum does not depend on who came last."""
    at = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    for split in range(splits):
        total += tl.load(part + split * stride + at, cache_modifier=".cg")
    return total


@triton.jit
def _linear_kernel(
    x,
    x_stride,
    weight,
    descriptor,
    out,
    partials,
    arrivals,
    num_rows,
    num_columns,
    size_k,
    splits,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_GATED: tl.constexpr,
    IN_PARTS: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.arange(0, ROWS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, DEPTH)
    steps = tl.cdiv(size_k, DEPTH)
    begin = split * steps // splits
    end = (split + 1) * steps // splits
    # Of the activated half, where there is one: its weights lie behind the others.
    gate = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    first_row = tile * COLUMNS
    up_row = first_row + num_columns if IS_GATED else first_row

    if PDL == "early" or PDL == "fetch":
        gdc_launch_dependents()
    if PDL == "fetch":
        # They do not depend on the kernel before, only x does.
        _prefetch(weight, up_row, column, begin * DEPTH, num_columns, size_k, COLUMNS, DEPTH)
        if IS_GATED:
            _prefetch(weight, first_row, column, begin * DEPTH, num_columns, size_k, COLUMNS, DEPTH)
    if PDL != "no":
        gdc_wait()

    for step in tl.range(begin, end, num_stages=STAGES):
        k = step * DEPTH + lane
        inside = (row[None, :] < num_rows) & (k[:, None] < size_k)
        rows = tl.load(x + row[None, :] * x_stride + k[:, None], mask=inside, other=0.0)
        w = _load_weights(weight, descriptor, up_row, column, k, num_columns, size_k, TMA)
        total = tl.dot(w, rows, total)
        if IS_GATED:
            w = _load_weights(weight, descriptor, first_row, column, k, num_columns, size_k, TMA)
            gate = tl.dot(w, rows, gate)

    if PDL == "late":
        gdc_launch_dependents()
    is_last = True
    if IN_PARTS:
        is_last = False
        at = (split * num_rows + row[None, :]) * num_columns + column[:, None]
        tl.store(partials + at, total, mask=(column[:, None] < num_columns) & (row[None, :] < num_rows))
    elif IS_SPLIT:
        SIZE: tl.constexpr = COLUMNS * ROWS
        halves: tl.constexpr = 2 if IS_GATED else 1
        part = partials + tile * splits * halves * SIZE
        at = tl.arange(0, COLUMNS)[:, None] * ROWS + row[None, :]
        tl.store(part + split * halves * SIZE + at, total)
        if IS_GATED:
            tl.store(part + (split * halves + 1) * SIZE + at, gate)
        # Every thread's part is written before this block counts as arrived.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrivals + tile, 1) == splits - 1
        if is_last:
            total = _sum_parts(part, halves * SIZE, splits, COLUMNS, ROWS)
            if IS_GATED:
                gate = _sum_parts(part + SIZE, halves * SIZE, splits, COLUMNS, ROWS)
            tl.store(arrivals + tile, 0)
    if is_last:
        if IS_GATED:
            # As SGLang's SiluAndMul: of halves that were rounded.
            gate = gate.to(out.dtype.element_ty).to(tl.float32)
            total = total.to(out.dtype.element_ty).to(tl.float32) * gate / (1 + tl.exp(-gate))
        inside = (column[:, None] < num_columns) & (row[None, :] < num_rows)
        tl.store(out + row[None, :] * num_columns + column[:, None], total.to(out.dtype.element_ty), mask=inside)


class Linear:
    """x [M, K] @ weight [N, K].T in one configuration, with scratch memory of its own. Gated: silu(a) * b of the halves
    a and b of such a product's columns. In parts: [splits, M, N] float32, to be added up."""

    def __init__(
        self,
        config: Config,
        num_rows: int,
        num_columns: int,
        is_gated: bool = False,
        pdl: str = "no",
        in_parts: bool = False,
    ) -> None:
        self.config, self.is_gated, self.pdl, self.in_parts = config, is_gated, pdl, in_parts
        self.num_columns = num_columns
        self.rows = max(16, triton.next_power_of_2(num_rows))
        self.tiles = triton.cdiv(num_columns, config.columns)
        size = self.tiles * config.splits * (1 + is_gated) * self.rows * config.columns
        self.partials = torch.empty(size, dtype=torch.float32, device=DEVICE)
        self.arrivals = torch.zeros(self.tiles, dtype=torch.int32, device=DEVICE)

    @property
    def fits(self) -> bool:
        return self.config.fits(self.rows, self.is_gated)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        config = self.config
        out = torch.empty((x.shape[0], self.num_columns), dtype=x.dtype, device=x.device)
        _linear_kernel[(self.tiles, config.splits)](
            x,
            x.stride(0),
            weight,
            TensorDescriptor.from_tensor(weight, [config.columns, config.depth]) if config.tma else weight,
            out,
            self.partials,
            self.arrivals,
            x.shape[0],
            self.num_columns,
            weight.shape[1],
            config.splits,
            ROWS=self.rows,
            COLUMNS=config.columns,
            DEPTH=config.depth,
            IS_SPLIT=config.splits > 1,
            IS_GATED=self.is_gated,
            IN_PARTS=self.in_parts,
            TMA=config.tma,
            PDL=self.pdl,
            STAGES=config.stages,
            num_warps=config.warps,
            launch_pdl=self.pdl != "no",
        )
        if self.in_parts:
            parts = self.partials[: config.splits * x.shape[0] * self.num_columns]
            return parts.view(config.splits, x.shape[0], self.num_columns)
        return out


# --- what it is compared with ---------------------------------------------------------------------------------------


@triton.jit
def _add_norm_kernel(x, residual, weight, out, num_rows, SIZE: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr):
    if PDL == "early" or PDL == "fetch":
        gdc_launch_dependents()
    if PDL != "no":
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = row * SIZE + tl.arange(0, SIZE)
    total = tl.load(x + at).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(x + part * num_rows * SIZE + at).to(tl.float32)
    total = total.to(residual.dtype.element_ty).to(tl.float32) + tl.load(residual + at).to(tl.float32)
    if PDL == "late":
        gdc_launch_dependents()
    tl.store(residual + at, total.to(residual.dtype.element_ty))
    scale = tl.rsqrt(tl.sum(total * total) / SIZE + 1e-6)
    normed = total * scale * tl.load(weight + tl.arange(0, SIZE)).to(tl.float32)
    tl.store(out + at, normed.to(out.dtype.element_ty))


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, pdl: str) -> torch.Tensor:
    """What stands between two GEMMs: [M, H], or parts of it [splits, M, H], in, and [M, H] out; `residual` changed in
    place."""
    out = torch.empty_like(residual)
    _add_norm_kernel[(len(residual),)](
        x,
        residual,
        weight,
        out,
        len(residual),
        SIZE=residual.shape[1],
        PARTS=len(x) if x.dim() == 3 else 1,
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl != "no",
    )
    return out


@triton.jit
def _activate_kernel(x, out, SIZE: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    gate = tl.load(x + row * 2 * SIZE + column).to(tl.float32)
    up = tl.load(x + row * 2 * SIZE + SIZE + column).to(tl.float32)
    tl.store(out + row * SIZE + column, (up * gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty))


def activate(x: torch.Tensor) -> torch.Tensor:
    """silu of the first half of the columns, times the second."""
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    _activate_kernel[(x.shape[0], out.shape[1] // 2048)](x, out, SIZE=out.shape[1], TILE=2048)
    return out


def in_torch(x: torch.Tensor, weight: torch.Tensor, is_gated: bool) -> torch.Tensor:
    out = x.float() @ weight.float().T
    if is_gated:
        gate, up = out.chunk(2, dim=-1)
        return functional.silu(gate) * up
    return out


def check(linear: Callable[[], torch.Tensor], name: str, want: torch.Tensor) -> None:
    """Raise AssertionError unless two calls in a row are right: the second finds what the first has left behind."""
    for _ in range(2):
        error = (linear().float() - want).norm() / want.norm()
        assert error < 2**-7, f"{name}: off by {error}"


# --- measurements ---------------------------------------------------------------------------------------------------


def microseconds(launch: Callable[[int], object], copies: int) -> float:
    """Per launch: the median of replays of a graph that goes over all copies of the weights."""
    if DEVICE == "cpu":
        launch(0)
        return math.nan
    launches = max(copies, 8)
    for i in range(copies):
        launch(i)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i % copies)
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times[1:])


def parse(shape: str) -> tuple[int, int, bool]:
    size, _, gated = shape.partition(" ")
    num_columns, size_k = (int(n) for n in size.split("x"))
    return num_columns, size_k, gated == "gated"


def use_library(name: str) -> None:
    if DEVICE == "cuda":
        torch.backends.cuda.preferred_blas_library(name)


def measure(rows: int, shape: str) -> Iterator[dict]:
    """PyTorch's libraries first, then cuBLASLt's algorithms, then every configuration."""
    num_columns, size_k, is_gated = parse(shape)
    cache = torch.cuda.get_device_properties(0).L2_cache_size if DEVICE == "cuda" else 0
    copies = 1 + 2 * cache // (num_columns * (1 + is_gated) * size_k * 2)
    torch.manual_seed(0)
    x = torch.randn(rows, size_k, device=DEVICE).to(DTYPE)
    # Small enough that an activation stays where it bends.
    weights = [torch.randn(num_columns * (1 + is_gated), size_k, device=DEVICE) for _ in range(copies)]
    weights = [(weight / size_k**0.5).to(DTYPE) for weight in weights]
    want = in_torch(x, weights[0], is_gated)
    num_bytes = weights[0].nbytes + x.nbytes + rows * num_columns * x.itemsize

    def row(library: str, config: Config | None, us: float) -> dict:
        found = {"rows": rows, "shape": shape, "library": library, "config": config and asdict(config)}
        return found | {"us": us, "tb_s": num_bytes / us / 1e6}

    def activated(out: torch.Tensor) -> torch.Tensor:
        return activate(out) if is_gated and DEVICE == "cuda" else out

    def in_library(i: int) -> torch.Tensor:
        return activated(functional.linear(x, weights[i]))

    def in_algorithm(product: cublaslt.Product, algorithm: cublaslt.Algorithm, i: int) -> torch.Tensor:
        return activated(product(x, weights[i], algorithm))

    for library in LIBRARIES:
        use_library(library)
        yield row(library, None, microseconds(in_library, copies))
    use_library("default")
    # What would be left to gain by fetching weights ahead.
    if weights[0].nbytes < cache:
        yield row("cublas, weights in L2", None, microseconds(lambda _: in_library(0), 1))
    if DEVICE == "cuda":
        product = cublaslt.Product(rows, num_columns * (1 + is_gated), size_k)
        for limit, name in ((cublaslt.WORKSPACE_BYTES, "algorithm"), (0, "algorithm without workspace")):
            for rank, algorithm in enumerate(product.algorithms(MOST_ALGORITHMS, limit)):
                linear = partial(in_algorithm, product, algorithm)
                check(partial(linear, 0), f"cuBLASLt's {name} {rank}", want)
                yield row(f"{name} {rank}", None, microseconds(linear, copies))
    for config in CONFIGS if rows <= MOST_ROWS else ():
        linear = Linear(config, rows, num_columns, is_gated)
        # A split of nothing is as slow as it is useless.
        if linear.fits and config.splits * config.depth <= size_k:
            check(partial(linear, x, weights[0]), str(config), want)
            yield row("ours", config, microseconds(lambda i, linear=linear: linear(x, weights[i]), copies))


def ways_of_a_layer(best: dict[str, Config]) -> Iterator[tuple[str, str, list[tuple]]]:
    """Names, PDL, and each of the layer's linears: its configuration and what `Linear` takes behind the rows."""
    for pdl, parts in itertools.product(PDL, (None, 2, 3, 4)):
        arguments = []
        for shape, (num_columns, _, is_gated) in zip(LAYER, map(parse, LAYER), strict=True):
            # Those whose results are normed.
            in_parts = parts is not None and num_columns == HIDDEN
            config = replace(best[shape], columns=64, depth=128, stages=4, splits=parts) if in_parts else best[shape]
            arguments.append((config, num_columns, is_gated, pdl, in_parts))
        yield f"ours, PDL {pdl}" + (f", {parts} parts" if parts else ""), pdl, arguments


def measure_layer(rows: int, best: dict[str, Config]) -> dict[str, float]:
    """Microseconds of a layer without its attention: cuBLAS, and ours in every way to launch it and to add up o and
    down."""
    copies, q_size = 4, HEADS * HEAD_DIM
    torch.manual_seed(0)
    sizes = [((1 + is_gated) * n, k) for n, k, is_gated in map(parse, LAYER)]
    layers = [[torch.randn(n, k, device=DEVICE).div(k**0.5).to(DTYPE) for n, k in sizes] for _ in range(copies)]
    norm = torch.ones(HIDDEN, device=DEVICE, dtype=DTYPE)
    x, residual = (torch.randn(rows, HIDDEN, device=DEVICE).to(DTYPE) for _ in range(2))

    def layer(i: int, linears: list[Callable], pdl: str) -> None:
        qkv, o, gate_up, down = (
            lambda x, linear=linear, weight=weight: linear(x, weight)
            for linear, weight in zip(linears, layers[i], strict=True)
        )
        attended = qkv(add_norm(x, residual, norm, pdl))[:, :q_size]
        hidden = add_norm(o(attended), residual, norm, pdl)
        x.copy_(add_norm(down(gate_up(hidden)), residual, norm, pdl))

    cublas = [functional.linear] * 4
    cublas[2] = lambda x, weight: activate(functional.linear(x, weight))
    found = {"cuBLAS": microseconds(lambda i: layer(i, cublas, "no"), copies)}
    for name, pdl, arguments in ways_of_a_layer(best):
        ours = [Linear(config, rows, *rest) for config, *rest in arguments]
        found[name] = microseconds(lambda i, ours=ours, pdl=pdl: layer(i, ours, pdl), copies)
    return found


def compile_one(
    config: Config, num_rows: int, num_columns: int, is_gated: bool, pdl: str = "no", in_parts: bool = False
) -> None:
    linear = Linear(config, num_rows, num_columns, is_gated, pdl, in_parts)
    if linear.fits:
        x, weight = (torch.zeros(n, 4096, device=DEVICE, dtype=DTYPE) for n in (num_rows, num_columns * (1 + is_gated)))
        linear(x, weight)


def compile_all(jobs: Iterable[tuple]) -> None:
    """Fill Triton's cache on all cores, before anything is timed: arguments of `compile_one`."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as processes:
        list(processes.map(compile_one, *zip(*set(jobs), strict=True)))


def best_by_shape(measured: list[dict], rows: int) -> dict[str, Config]:
    ours = [row for row in measured if row["rows"] == rows and row["config"] is not None]
    shapes = {row["shape"] for row in ours}
    return {
        shape: Config(**min((row for row in ours if row["shape"] == shape), key=lambda row: row["us"])["config"])
        for shape in shapes
    }


def report(setup: dict, measured: list[dict], layers: dict[int, dict[str, float]], title: str) -> str:
    lines = [f"# {title}", "", f"{setup['hardware']}; {setup['versions']}.", "", f"    {setup['command']}", ""]
    lines += [
        "Weights of N x K, twice as many columns where gated. TB/s are of all bytes, each moved once; ours is the best "
        "configuration.",
        "",
        "| rows | N x K | cuBLAS, us | TB/s | in L2, us | cuBLASLt, us | best algorithm, us | which | ours, us | "
        "TB/s | cuBLAS / ours | columns, depth, stages, warps, splits, TMA |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (rows, shape), group in itertools.groupby(measured, lambda row: (row["rows"], row["shape"])):
        group = list(group)
        by_name = {row["library"]: row for row in group if row["config"] is None}
        cublas = by_name["cublas"]
        algorithms = [row for name, row in by_name.items() if name.startswith("algorithm")]
        cells = [rows, shape, f"{cublas['us']:.1f}", f"{cublas['tb_s']:.2f}"]
        cells += [
            f"{by_name[name]['us']:.1f}" if name in by_name else "" for name in ("cublas, weights in L2", "cublaslt")
        ]
        best = min(algorithms, key=lambda row: row["us"], default=None)
        cells += [f"{best['us']:.1f}", best["library"].removeprefix("algorithm ")] if best else ["", ""]
        best = min((row for row in group if row["config"]), key=lambda row: row["us"], default=None)
        if best:
            cells += [f"{best['us']:.1f}", f"{best['tb_s']:.2f}", f"{cublas['us'] / best['us']:.3f}"]
            cells.append(", ".join(str(int(value)) for value in best["config"].values()))
        else:
            cells += [""] * 4
        lines.append(f"| {' | '.join(map(str, cells))} |")
    for rows, found in layers.items():
        times = "; ".join(f"{name} {us:.1f}" for name, us in found.items())
        lines += ["", f"A layer's GEMMs and three norms at {rows} rows, us: {times}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 128, 512])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--out", type=Path, default=Path("work/linear"), help="without suffix")
    args = parser.parse_args()
    setup = {
        "hardware": hardware(DEVICE),
        "versions": versions(),
        "command": f"{date.today()}: python3 scripts/bench_linear.py {shlex.join(sys.argv[1:])}",
    }
    few_rows = [rows for rows in args.rows if rows <= MOST_ROWS]
    if DEVICE == "cuda" and few_rows:
        # The number of splits is no constant of the kernel.
        configs = [config for config in CONFIGS if config.splits <= 2]
        compile_all(
            (config, rows, 512, is_gated) for config in configs for rows in few_rows for is_gated in (False, True)
        )
    measured, layers = [], {}
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        """What has been measured is kept, whatever comes after."""
        results = {"setup": setup, "runs": measured, "layers": layers}
        Path(f"{args.out}.json").write_text(json.dumps(results) + "\n")
        Path(f"{args.out}.md").write_text(report(setup, measured, layers, args.out.name.replace("_", " ")))

    for rows, shape in itertools.product(args.rows, args.shapes):
        measured += measure(rows, shape)
        save()
    if DEVICE == "cuda" and set(LAYER) <= set(args.shapes):
        for rows in few_rows:
            best = best_by_shape(measured, rows)
            compile_all((config, rows, *rest) for *_, arguments in ways_of_a_layer(best) for config, *rest in arguments)
            layers[rows] = measure_layer(rows, best)
            save()
    print(Path(f"{args.out}.md").read_text())


if __name__ == "__main__":
    main()
