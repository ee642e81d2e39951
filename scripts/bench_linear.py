"""Would a GEMM of our own stream weights faster than cuBLAS, for the few rows that a cycle verifies?

    python3 scripts/bench_linear.py --out scripts/results/linear_h100

The candidate is in bench/few_rows.py. Beside it stands every algorithm that cuBLASLt offers, of which PyTorch takes the
first. Launches are replayed from a CUDA graph and take turns over copies of the weights, more than the L2 cache holds.
First each shape of Qwen3-8B alone, at one GPU and as shards of two and four; then a layer's GEMMs with the norms
between them, in the best configurations. Without a GPU, Triton's interpreter shows that the script works and the kernel
is right:

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
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path

import torch
from bench import cublaslt
from bench.few_rows import DEVICE, DTYPE, PDL, Config, Linear, activate, add_norm, in_torch
from bench.machine import hardware, versions
from torch.nn import functional

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

CONFIGS = [
    Config(*values)
    for values in itertools.product((32, 64, 128), (64, 128, 256), (3, 4, 6), (4, 8), (1, 2, 3, 4, 6, 8), (False, True))
    # Fewer bytes in flight cannot keep the memory busy, whatever else is chosen.
    if values[0] * values[1] * values[2] * 2 >= 32 * 1024
]


def check(linear: Callable[[], torch.Tensor], name: str, want: torch.Tensor) -> None:
    """Raise AssertionError unless two calls in a row are right: the second finds what the first has left behind."""
    for _ in range(2):
        error = (linear().float() - want).norm() / want.norm()
        assert error < 2**-7, f"{name}: off by {error}"


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


def measure(rows: int, shape: str, tinygemm: bool) -> Iterator[dict]:
    """PyTorch's libraries first, then FlashInfer's, cuBLASLt's algorithms, and every configuration of ours."""
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
    if tinygemm:
        # Compiles it at first use.
        from flashinfer.gemm import tinygemm_bf16

        out = x.new_empty(rows, len(weights[0]))

        def in_tinygemm(i: int) -> torch.Tensor:
            tinygemm_bf16(x, weights[i], out)
            return activated(out)

        check(partial(in_tinygemm, 0), "tinygemm", want)
        yield row("tinygemm", None, microseconds(in_tinygemm, copies))
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


def fastest(measured: Iterable[dict]) -> dict | None:
    return min(measured, key=lambda row: row["us"], default=None)


def best_by_shape(measured: list[dict], rows: int) -> dict[str, Config]:
    ours = [row for row in measured if row["rows"] == rows and row["config"]]
    shapes = {row["shape"] for row in ours}
    return {shape: Config(**fastest(row for row in ours if row["shape"] == shape)["config"]) for shape in shapes}


def report(setup: dict, measured: list[dict], layers: dict[int, dict[str, float]], title: str) -> str:
    lines = [f"# {title}", "", f"{setup['hardware']}; {setup['versions']}.", "", f"    {setup['command']}", ""]
    lines += [
        "Weights of N x K, twice as many columns where gated. TB/s are of all bytes, each moved once; ours is the best "
        "configuration.",
        "",
        "| rows | N x K | cuBLAS, us | TB/s | in L2, us | cuBLASLt, us | tinygemm, us | best algorithm, us | which | "
        "ours, us | TB/s | cuBLAS / ours | columns, depth, stages, warps, splits, TMA |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (rows, shape), group in itertools.groupby(measured, lambda row: (row["rows"], row["shape"])):
        group = list(group)
        by_name = {row["library"]: row for row in group if row["config"] is None}
        cublas = by_name["cublas"]
        cells = [rows, shape, f"{cublas['us']:.1f}", f"{cublas['tb_s']:.2f}"]
        others = ("cublas, weights in L2", "cublaslt", "tinygemm")
        cells += [f"{by_name[name]['us']:.1f}" if name in by_name else "" for name in others]
        best = fastest(row for name, row in by_name.items() if name.startswith("algorithm"))
        cells += [f"{best['us']:.1f}", best["library"].removeprefix("algorithm ")] if best else ["", ""]
        best = fastest(row for row in group if row["config"])
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
    parser.add_argument("--tinygemm", action="store_true", help="FlashInfer's GEMM for up to 8 rows, too")
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
        measured += measure(rows, shape, args.tinygemm)
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
