"""Would a GEMM of our own stream weights faster than cuBLAS, for the few rows that a cycle verifies?

    python3 scripts/bench_linear.py --out scripts/results/linear_h100

A candidate, which the package does not use: Triton, split along K where there are too few columns to fill the GPU, with
the partial sums added up in order by whichever thread block comes last. Shapes are Qwen3-8B's; launches are replayed
from a CUDA graph and take turns over copies of the weights, more than the L2 cache holds. Without a GPU, Triton's
interpreter shows that the script works and the kernel is right:

    TRITON_INTERPRET=1 python3 scripts/bench_linear.py --rows 3 --shapes 48x40 --out work/linear
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
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
import triton
import triton.language as tl
from bench.machine import hardware, versions
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter multiplies the bits of bfloat16 numbers as if they were integers.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32

# Columns x K. Behind qkv, o, gate_up and down of a layer: the context's fc and its layers' k and v, and lm_head.
SHAPES = ["6144x4096", "4096x4096", "24576x4096", "4096x12288", "4096x20480", "10240x4096", "151936x4096"]
# Of an H100; what a block may have in shared memory is checked before it is compiled.
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

    def fits(self, rows: int) -> bool:
        return self.stages * (self.columns + rows) * self.depth * 2 <= SHARED_MEMORY


CONFIGS = [
    Config(columns, depth, stages, warps, splits, tma)
    for columns, depth, stages, warps, splits, tma in itertools.product(
        (64, 128), (64, 128, 256), (3, 4, 6), (4, 8), (1, 2, 3, 4, 6, 8), (False, True)
    )
    # Fewer bytes in flight cannot keep the memory busy, whatever else is chosen.
    if stages * columns * depth * 2 >= 48 * 1024
]


@triton.jit
def _linear_kernel(
    x,
    weight,
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
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, ROWS)
    column = (tile * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    lane = tl.arange(0, DEPTH)
    depths = tl.cdiv(size_k, DEPTH)
    begin = split * depths // splits
    end = (split + 1) * depths // splits
    total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        k = step * DEPTH + lane
        if TMA:
            w = weight.load([tile * COLUMNS, step * DEPTH])
        else:
            inside = (column[:, None] < num_columns) & (k[None, :] < size_k)
            w = tl.load(weight + column[:, None] * size_k + k[None, :], mask=inside, other=0.0)
        inside = (row[None, :] < num_rows) & (k[:, None] < size_k)
        total = tl.dot(w, tl.load(x + row[None, :] * size_k + k[:, None], mask=inside, other=0.0), total)

    inside = (column[:, None] < num_columns) & (row[None, :] < num_rows)
    if IS_SPLIT:
        part = partials + (tile * splits * COLUMNS * ROWS).to(tl.int64)
        at = tl.arange(0, COLUMNS)[:, None] * ROWS + row[None, :]
        tl.store(part + split * COLUMNS * ROWS + at, total)
        # Every thread's part is written before this block counts as arrived.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1) == splits - 1:
            total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
            for other in range(splits):
                total += tl.load(part + other * COLUMNS * ROWS + at, cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
            tl.store(out + row[None, :] * num_columns + column[:, None], total.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + row[None, :] * num_columns + column[:, None], total.to(out.dtype.element_ty), mask=inside)


class Linear:
    """x [M, K] @ weight [N, K].T in one configuration, with scratch memory of its own."""

    def __init__(self, config: Config, num_rows: int, num_columns: int) -> None:
        self.config = config
        self.rows = max(16, triton.next_power_of_2(num_rows))
        self.tiles = triton.cdiv(num_columns, config.columns)
        tile_size = self.rows * config.columns
        self.partials = torch.empty(self.tiles * config.splits * tile_size, dtype=torch.float32, device=DEVICE)
        self.arrivals = torch.zeros(self.tiles, dtype=torch.int32, device=DEVICE)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        config, (num_columns, size_k) = self.config, weight.shape
        out = torch.empty((x.shape[0], num_columns), dtype=x.dtype, device=x.device)
        _linear_kernel[(self.tiles, config.splits)](
            x,
            TensorDescriptor.from_tensor(weight, [config.columns, config.depth]) if config.tma else weight,
            out,
            self.partials,
            self.arrivals,
            x.shape[0],
            num_columns,
            size_k,
            config.splits,
            ROWS=self.rows,
            COLUMNS=config.columns,
            DEPTH=config.depth,
            IS_SPLIT=config.splits > 1,
            TMA=config.tma,
            STAGES=config.stages,
            num_warps=config.warps,
        )
        return out


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


def check(linear: Linear, x: torch.Tensor, weight: torch.Tensor, want: torch.Tensor) -> None:
    """Raise AssertionError unless two calls in a row are right: the second finds what the first has left behind."""
    for _ in range(2):
        error = (linear(x, weight).float() - want).norm() / want.norm()
        assert error < 2**-7, f"{linear.config}: off by {error}"


def measure(rows: int, shape: str) -> Iterator[dict]:
    """cuBLAS first, then every configuration."""
    num_columns, size_k = (int(size) for size in shape.split("x"))
    cache = torch.cuda.get_device_properties(0).L2_cache_size if DEVICE == "cuda" else 0
    copies = 1 + 2 * cache // (num_columns * size_k * 2)
    torch.manual_seed(0)
    x = torch.randn(rows, size_k, device=DEVICE).to(DTYPE)
    weights = [torch.randn(num_columns, size_k, device=DEVICE).to(DTYPE) for _ in range(copies)]
    want = x.float() @ weights[0].float().T
    num_bytes = weights[0].nbytes + x.nbytes + rows * num_columns * 2

    def row(config: Config | None, us: float) -> dict:
        return {
            "rows": rows,
            "shape": shape,
            "config": config and asdict(config),
            "us": us,
            "tb_s": num_bytes / us / 1e6,
        }

    yield row(None, microseconds(lambda i: functional.linear(x, weights[i]), copies))
    for config in CONFIGS:
        linear = Linear(config, rows, num_columns)
        # A split of nothing is as slow as it is useless.
        if config.fits(linear.rows) and config.splits * config.depth <= size_k:
            check(linear, x, weights[0], want)
            yield row(config, microseconds(lambda i, linear=linear: linear(x, weights[i]), copies))


def compile_one(config: Config, num_rows: int) -> None:
    linear = Linear(config, num_rows, 512)
    if config.fits(linear.rows):
        linear(
            torch.zeros(num_rows, 4096, device=DEVICE, dtype=DTYPE), torch.zeros(512, 4096, device=DEVICE, dtype=DTYPE)
        )


def compile_all(rows: list[int]) -> None:
    """Fill Triton's cache on all cores, before anything is timed. The number of splits is no constant of the kernel."""
    configs = [config for config in CONFIGS if config.splits <= 2]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as processes:
        list(processes.map(compile_one, configs * len(rows), [r for r in rows for _ in configs]))


def report(setup: dict, measured: list[dict], title: str) -> str:
    lines = [f"# {title}", "", f"{setup['hardware']}; {setup['versions']}.", "", f"    {setup['command']}", ""]
    lines += [
        "Weights of N x K, in bfloat16. TB/s are of all bytes, each moved once; ours is the best configuration.",
        "",
        "| rows | N x K | cuBLAS, us | TB/s | ours, us | TB/s | ratio | columns, depth, stages, warps, splits, TMA |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (rows, shape), group in itertools.groupby(measured, lambda row: (row["rows"], row["shape"])):
        cublas, *ours = group
        best = min(ours, key=lambda row: row["us"])
        lines.append(
            f"| {rows} | {shape} | {cublas['us']:.1f} | {cublas['tb_s']:.2f} | {best['us']:.1f} | {best['tb_s']:.2f} | "
            f"{cublas['us'] / best['us']:.3f} | {', '.join(str(int(v)) for v in best['config'].values())} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 128])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--out", type=Path, default=Path("work/linear"), help="without suffix")
    args = parser.parse_args()
    setup = {
        "hardware": hardware(DEVICE),
        "versions": versions(),
        "command": f"{date.today()}: python3 scripts/bench_linear.py {shlex.join(sys.argv[1:])}",
    }
    if DEVICE == "cuda":
        compile_all(args.rows)
    measured = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for rows, shape in itertools.product(args.rows, args.shapes):
        measured += measure(rows, shape)
        # What has been measured is kept, whatever comes after.
        Path(f"{args.out}.json").write_text(json.dumps({"setup": setup, "runs": measured}) + "\n")
        Path(f"{args.out}.md").write_text(report(setup, measured, args.out.name.replace("_", " ")))
    print(Path(f"{args.out}.md").read_text())


if __name__ == "__main__":
    main()
