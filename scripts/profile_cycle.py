"""Where a decode cycle's GPU time goes: kernels, launches and gaps, for this package and SGLang's in-tree DFLASH.

    python3 scripts/profile_cycle.py --pair qwen3-8b --backends fa3 --batch 1 32 --out scripts/results/profile.md

Traces a few steady cycles with PyTorch's profiler inside the real engine. Profiling itself costs time, so compare
shares and counts here, and total times in bench_sweep.py.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.engine import Configuration, check_worker, engine_arguments, environment
from bench.pairs import PAIRS, checkpoint

# The kernel that lays out the next block, ours and in-tree: launched once a cycle.
BLOCK_KERNELS = ("_prepare_block_kernel", "_prepare_dflash_draft_block")

GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}


def trace_engine(args: argparse.Namespace) -> None:
    """Run one configuration in this process and print one JSON line for every batch size."""
    import sglang

    pair = PAIRS[args.pair]
    paths = {model: checkpoint(model, args.models) for model in (pair.target, pair.drafter)}
    configuration = Configuration(args.mode, pair.target, pair.drafter, args.backend)
    arguments = engine_arguments(configuration, paths, args.batch, "cuda", pair.is_dummy)
    engine = sglang.Engine(**arguments, mem_fraction_static=0.75)
    check_worker(engine, args.mode)
    rng = random.Random(0)
    for batch in args.batch:
        prompts = [[rng.randrange(100, 4000) for _ in range(512)] for _ in range(batch)]
        sampling = {"temperature": 0, "max_new_tokens": 600, "ignore_eos": True}
        engine.generate(input_ids=prompts, sampling_params=sampling)
        with tempfile.TemporaryDirectory() as folder:
            engine.start_profile(output_dir=folder, activities=["GPU"], num_steps=args.cycles + 4, with_stack=False)
            engine.generate(input_ids=prompts, sampling_params=sampling)
            deadline = time.monotonic() + 60
            while not (traces := list(Path(folder).glob("*.json.gz"))) and time.monotonic() < deadline:
                time.sleep(0.5)
            time.sleep(2)  # the file exists before it is complete
            events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
        summary = summarize([e for e in events if e.get("cat") in GPU_WORK], args.cycles)
        print(
            "RESULT " + json.dumps({"mode": args.mode, "backend": args.backend, "batch": batch} | summary), flush=True
        )
    engine.shutdown()


def in_graph(event: dict) -> bool:
    return bool(event["args"].get("graph node id"))


def summarize(events: list[dict], cycles: int) -> dict:
    """Per cycle: wall and busy time of the GPU, and every kernel's count and time.

    A cycle begins with one of `BLOCK_KERNELS`.
    """
    events.sort(key=lambda e: e["ts"])
    starts = [e["ts"] for e in events if e["name"].startswith(BLOCK_KERNELS)][-cycles:]
    window = [e for e in events if starts[0] <= e["ts"] < starts[-1]]
    num_cycles = len(starts) - 1
    busy, last_end = 0.0, 0.0
    for e in window:
        busy += max(0.0, e["ts"] + e["dur"] - max(e["ts"], last_end))
        last_end = max(last_end, e["ts"] + e["dur"])
    kernels: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0, 0])
    for e in window:
        row = kernels[e["name"][:110]]
        row[0] += 1
        row[1] += e["dur"]
        row[2] += in_graph(e)
    rows = [
        {"name": name, "count": n / num_cycles, "us": us / num_cycles, "in_graph": graph / n}
        for name, (n, us, graph) in kernels.items()
    ]
    rows.sort(key=lambda row: -row["us"])
    outside = [e for e in window if not in_graph(e)]
    return {
        "cycle_us": statistics.median(b - a for a, b in itertools.pairwise(starts)),
        "busy_us": busy / num_cycles,
        "launches": len(window) / num_cycles,
        "launches_outside_graphs": len(outside) / num_cycles,
        "us_outside_graphs": sum(e["dur"] for e in outside) / num_cycles,
        "kernels": rows,
    }


def report(results: list[dict], top: int) -> str:
    lines = []
    for r in results:
        lines += [
            f"## {r['mode']}, {r['backend']}, batch {r['batch']}",
            "",
            f"cycle {r['cycle_us']:.0f} us, GPU busy {r['busy_us']:.0f} us; {r['launches']:.0f} launches, of which "
            f"{r['launches_outside_graphs']:.0f} outside graphs ({r['us_outside_graphs']:.0f} us)",
            "",
            "| us per cycle | launches | in graph | kernel |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {k['us']:.1f} | {k['count']:.1f} | {k['in_graph']:.0%} | `{k['name']}` |" for k in r["kernels"][:top]
        ]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=[name for name, pair in PAIRS.items() if pair.is_dummy], default="qwen3-8b")
    parser.add_argument("--backends", nargs="+", default=["fa3"])
    parser.add_argument("--modes", nargs="+", choices=["in-tree", "ours"], default=["in-tree", "ours"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--cycles", type=int, default=12)
    parser.add_argument("--top", type=int, default=60, help="kernels to list")
    parser.add_argument("--accept-length", type=float, default=6.5)
    parser.add_argument("--models", type=Path, default=Path("/tmp/dflash-dummy-models"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trace", action="store_true", help="trace one configuration in this process")
    parser.add_argument("--mode")
    parser.add_argument("--backend")
    args = parser.parse_args()
    if args.trace:
        trace_engine(args)
        return
    results = []
    for backend in args.backends:
        for mode in args.modes:
            command = [sys.executable, __file__, "--trace", "--mode", mode, "--backend", backend, "--pair", args.pair]
            command += ["--batch", *map(str, args.batch), "--models", str(args.models), "--cycles", str(args.cycles)]
            env = environment(mode, accept_length=args.accept_length)
            run = subprocess.run(command, env=env, capture_output=True, text=True)
            if run.returncode:
                raise RuntimeError(f"{mode} on {backend} failed:\n{run.stderr[-6000:]}")
            lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
            results += [json.loads(line.removeprefix("RESULT ")) for line in lines]
    text = report(results, args.top)
    print(text)
    if args.out:
        args.out.write_text(text)
        args.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
