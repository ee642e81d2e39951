"""Compare the package's kernel for few rows with cuBLAS, for each linear layer of a cycle.

    python3 scripts/bench_linear.py --out scripts/results/linear_h100

It also measures every algorithm that cuBLASLt offers, of which PyTorch takes the first, and the kernel with other
tiles. Launches are replayed from a CUDA graph. They alternate over copies of the weights that exceed the L2 cache.
First comes each shape alone, of Qwen3-8B on one GPU and as shards of two and four. Then comes a layer's sequence of
linear layers and norms, with the package's kernels where it uses them.
Without a GPU, Triton's interpreter shows that the script works:

    TRITON_INTERPRET=1 python3 scripts/bench_linear.py --rows 3 --shapes "48x300 gated" --out work/linear
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from datetime import date
from functools import partial
from pathlib import Path

import torch
from bench import cublaslt
from bench.arguments import positive
from bench.machine import hardware, versions
from torch.nn import functional

from sglang_dflash.ops.kernels import linear_few_rows as kernel
from sglang_dflash.ops.kernels.add_rms_norm import add_rms_norm
from sglang_dflash.ops.reference.add_rms_norm import add_rms_norm as add_rms_norm_reference
from sglang_dflash.ops.reference.linear_few_rows import MAX_ROWS, max_rows
from sglang_dflash.ops.reference.linear_few_rows import linear_few_rows as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter multiplies the bits of bfloat16 numbers as if they were integers.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
HIDDEN, HEADS, HEAD_DIM = 4096, 32, 128
# Columns x depth of a layer's qkv, o, gate_up (half its columns, as after its activation) and down on one, two and four
# GPUs; then the context's fc and its layers' k and v; then lm_head.
LAYER = ["6144x4096", "4096x4096", "12288x4096 gated", "4096x12288"]
SHARDS = ["3072x4096", "4096x2048", "6144x4096 gated", "4096x6144", "1536x4096", "4096x1024", "3072x4096 gated"]
SHAPES = [*LAYER, *SHARDS, "4096x3072", "4096x20480", "10240x4096", "151936x4096"]
# Most algorithms to ask cuBLASLt for, which has fewer for most shapes.
MOST_ALGORITHMS = 16
EPS = 1e-6
# Shared memory of an H100 that a thread block may use. Checked before anything is compiled.
SHARED_MEMORY = 227 * 1024


@dataclass(frozen=True)
class Tiles:
    """Tiles of the kernel: `columns` x `depth` weights, `stages` of them in flight."""

    columns: int
    depth: int
    warps: int
    stages: int

    def fit(self, rows: int, is_gated: bool) -> bool:
        return self.stages * (self.columns * (1 + is_gated) + max(rows, 16)) * self.depth * 2 <= SHARED_MEMORY

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, is_gated: bool) -> torch.Tensor:
        return kernel.launch(x, weight, is_gated, *astuple(self))


TILES = [
    tiles
    for tiles in itertools.starmap(Tiles, itertools.product((32, 64, 128), (64, 128, 256), (4, 8), (3, 4, 6)))
    # Fewer bytes in flight cannot saturate the memory bandwidth.
    if tiles.columns * tiles.depth * tiles.stages * 2 >= 32 * 1024
]


def activated(out: torch.Tensor, is_gated: bool) -> torch.Tensor:
    """Return the activation that SGLang computes after a gated layer."""
    if not is_gated:
        return out
    if DEVICE == "cpu":
        gate, up = out.chunk(2, dim=-1)
        return functional.silu(gate) * up
    from sglang.srt.layers.activation import silu_and_mul

    return silu_and_mul(out, out.new_empty(out.shape[0], out.shape[1] // 2))


def library_product(x: torch.Tensor, weight: torch.Tensor, is_gated: bool) -> torch.Tensor:
    return activated(functional.linear(x, weight), is_gated)


def library_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    """Compute the norm between a layer's parts as SGLang does."""
    if DEVICE == "cpu":
        add_rms_norm_reference(x, residual, weight, EPS, 0.0, False)
        return
    from sgl_kernel import fused_add_rmsnorm

    fused_add_rmsnorm(x, residual, weight, EPS)


def check(name: str, linear: Callable[[], torch.Tensor], want: torch.Tensor) -> None:
    """Raise AssertionError unless a result is correct."""
    error = (linear().float() - want.float()).norm() / want.float().norm()
    assert error < 2**-7, f"{name}: off by {error}"


def microseconds(launch: Callable[[int], object], copies: int) -> float:
    """Return the time per launch: the median over replays of a graph that uses all copies of the weights."""
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


def known_shape(text: str) -> str:
    """Return an argument of the command line that is a shape."""
    if re.fullmatch("[1-9][0-9]*x[1-9][0-9]*( gated)?", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected COLUMNSxDEPTH or 'COLUMNSxDEPTH gated'")
    return text


def linears(rows: int, shape: str) -> Iterator[tuple[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]]:
    """Yield the implementations to compare, by name."""
    num_columns, size_k, is_gated = parse(shape)
    yield "cuBLAS", partial(library_product, is_gated=is_gated)
    if DEVICE == "cuda":
        product = cublaslt.Product(rows, num_columns * (1 + is_gated), size_k)
        for limit, name in ((cublaslt.WORKSPACE_BYTES, "algorithm"), (0, "algorithm without workspace")):
            for rank, algorithm in enumerate(product.algorithms(MOST_ALGORITHMS, limit)):
                yield f"{name} {rank}", lambda x, w, a=algorithm: activated(product(x, w, a), is_gated)
    if rows <= max_rows(num_columns, size_k, is_gated):
        yield "ours", partial(kernel.linear_few_rows, is_gated=is_gated)
    if rows <= MAX_ROWS:
        for tiles in TILES:
            if tiles.fit(rows, is_gated):
                yield f"tiles {astuple(tiles)}", partial(tiles, is_gated=is_gated)


def measure(rows: int, shape: str) -> dict:
    num_columns, size_k, is_gated = parse(shape)
    cache = torch.cuda.get_device_properties(0).L2_cache_size if DEVICE == "cuda" else 0
    copies = 1 + 2 * cache // (num_columns * (1 + is_gated) * size_k * 2)
    torch.manual_seed(0)
    x = torch.randn(rows, size_k, device=DEVICE).to(DTYPE)
    # Small weights, so that activations are in the nonlinear range.
    weights = [torch.randn(num_columns * (1 + is_gated), size_k, device=DEVICE) for _ in range(copies)]
    weights = [(weight / size_k**0.5).to(DTYPE) for weight in weights]
    want = reference(x, weights[0], is_gated)
    us = {}
    for name, linear in linears(rows, shape):
        check(name, partial(linear, x, weights[0]), want)
        us[name] = microseconds(lambda i, linear=linear: linear(x, weights[i]), copies)
    num_bytes = weights[0].nbytes + x.nbytes + rows * num_columns * x.itemsize
    return {"rows": rows, "shape": shape, "bytes": num_bytes, "us": us}


def measure_layer(rows: int) -> dict[str, float]:
    """Return the microseconds of a layer's four products and two norms in sequence."""
    copies, q_size = 4, HEADS * HEAD_DIM
    torch.manual_seed(0)
    shapes = [parse(shape) for shape in LAYER]
    layers = [
        [torch.randn((1 + is_gated) * n, k, device=DEVICE).div(k**0.5).to(DTYPE) for n, k, is_gated in shapes]
        for _ in range(copies)
    ]
    x, residual = torch.randn(2, rows, HIDDEN, device=DEVICE).to(DTYPE)
    norm_weight = torch.ones(HIDDEN, device=DEVICE, dtype=DTYPE)

    def our_product(x: torch.Tensor, weight: torch.Tensor, is_gated: bool) -> torch.Tensor:
        num_columns, size_k = weight.shape[0] // (1 + is_gated), weight.shape[1]
        is_ours = rows <= max_rows(num_columns, size_k, is_gated)
        linear = kernel.linear_few_rows if is_ours else library_product
        return linear(x, weight, is_gated)

    def our_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
        add_rms_norm(x, residual, weight, EPS, 0.0, rows <= MAX_ROWS)

    def layer(i: int, product: Callable, norm: Callable) -> None:
        qkv, o, gate_up, down = layers[i]
        norm(x, residual, norm_weight)
        hidden = product(product(x, qkv, False)[:, :q_size], o, False)
        norm(hidden, residual, norm_weight)
        product(product(hidden, gate_up, True), down, False)

    ways = {"cuBLAS": (library_product, library_norm), "ours": (our_product, our_norm)}
    return {
        name: microseconds(partial(layer, product=product, norm=norm), copies) for name, (product, norm) in ways.items()
    }


def compile_one(tiles: Tiles, rows: int, is_gated: bool) -> None:
    if tiles.fit(rows, is_gated):
        x, weight = (torch.zeros(n, 4096, device=DEVICE, dtype=DTYPE) for n in (rows, 512 * (1 + is_gated)))
        tiles(x, weight, is_gated)


def report(setup: dict, measured: list[dict], layers: dict[int, dict[str, float]], title: str) -> str:
    lines = [f"# {title}", "", f"{setup['hardware']}; {setup['versions']}.", "", f"    {setup['command']}", ""]
    lines += [
        "Weights of N x K, twice as many columns where gated. TB/s are of all bytes, each moved once.",
        "",
        "| rows | N x K | cuBLAS, us | TB/s | best algorithm, us | which | ours, us | TB/s | cuBLAS / ours | "
        "best tiles, us | columns, depth, warps, stages |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in measured:
        us = row["us"]
        cells = [row["rows"], row["shape"], *with_speed(row, "cuBLAS"), *fastest(us, "algorithm ")]
        cells += [*with_speed(row, "ours"), f"{us['cuBLAS'] / us['ours']:.3f}"] if "ours" in us else [""] * 3
        cells += fastest(us, "tiles ")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    for rows, found in layers.items():
        times = ", ".join(f"{name} {us:.1f}" for name, us in found.items())
        lines += ["", f"A layer's products and norms at {rows} rows, us: {times}."]
    return "\n".join(lines) + "\n"


def with_speed(row: dict, name: str) -> tuple[str, str]:
    return f"{row['us'][name]:.1f}", f"{row['bytes'] / row['us'][name] / 1e6:.2f}"


def fastest(us: dict[str, float], prefix: str) -> tuple[str, str]:
    """Return the smallest time among names with the prefix, and the rest of its name."""
    names = [name for name in us if name.startswith(prefix)]
    best = min(names, key=us.get, default=None)
    return ("", "") if best is None else (f"{us[best]:.1f}", best.removeprefix(prefix))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=positive, default=[8, 16, 32, 64])
    parser.add_argument("--shapes", nargs="+", type=known_shape, default=SHAPES)
    parser.add_argument("--out", type=Path, default=Path("work/linear"), help="without suffix")
    args = parser.parse_args()
    setup = {
        "hardware": hardware(DEVICE),
        "versions": versions(),
        "command": f"{date.today()}: python3 scripts/bench_linear.py {shlex.join(sys.argv[1:])}",
    }
    few_rows = [rows for rows in args.rows if rows <= MAX_ROWS]
    if DEVICE == "cuda" and few_rows:
        # Fill Triton's cache on all cores before the first measurement.
        with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as processes:
            list(processes.map(compile_one, *zip(*itertools.product(TILES, few_rows, (False, True)), strict=True)))
    measured, layers = [], {}
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        """Save the measurements so far, so that a later failure loses none."""
        results = {"setup": setup, "runs": measured, "layers": layers}
        Path(f"{args.out}.json").write_text(json.dumps(results) + "\n")
        Path(f"{args.out}.md").write_text(report(setup, measured, layers, args.out.name.replace("_", " ")))

    for rows, shape in itertools.product(args.rows, args.shapes):
        measured.append(measure(rows, shape))
        save()
    for rows in args.rows if DEVICE == "cuda" else ():
        layers[rows] = measure_layer(rows)
        save()
    print(Path(f"{args.out}.md").read_text())


if __name__ == "__main__":
    main()
