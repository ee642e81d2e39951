"""Profile the GPU time of a decode cycle: kernels, gaps and host calls, for this package and SGLang's in-tree DFLASH.

    python3 scripts/profile_cycle.py --pair qwen3-8b --backends fa3 --batch 1 32 --out scripts/results/profile

It traces a few steady cycles with PyTorch's profiler inside the real engine. Engines that fit on the GPU start together
and are traced in turn. OUT.md and OUT.json are written after every trace. Profiling itself takes time, so compare
shares and counts here, and total times with bench_sweep.py.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import statistics
import tempfile
from pathlib import Path

from bench.arguments import number_or_none, positive
from bench.groups import Candidate, pack, running
from bench.pairs import PAIRS
from bench.prompts import Prompts
from bench.workload import Configuration, Load, Workload

# The kernels that prepare the next block, ours and in-tree. One is launched per cycle, in a graph or outside.
BLOCK_KERNELS = ("_prepare_block_kernel", "_prepare_dflash_draft_block")

GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
HOST_CALLS = {"cuda_runtime", "cuda_driver"}
# Calls in which the scheduler waits for the GPU.
HOST_SYNCS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")

PROMPT_TOKENS = 512
# Scheduler steps before the traced cycles: prefill, and cycles while the batch fills up.
LEAD_STEPS = 12
BLOCK_SIZE = 16


def plan(args: argparse.Namespace) -> list[list[Candidate]]:
    """Return groups of engines that run at the same time."""
    pair = PAIRS[args.pair]
    workload = Workload(
        measure="decode",
        prompts=[Prompts(None, PROMPT_TOKENS)],
        concurrency=args.batch,
        # Longer than the trace with any acceptance length.
        new_tokens=BLOCK_SIZE * (LEAD_STEPS + args.cycles + 8),
        plain_tokens=0,
        requests=None,
        accept_length=args.accept_length,
        recorded_drafts=None,
        chat_arguments={},
        temperatures=[0.0],
    )
    # The in-tree worker has chains only.
    ways = [(mode, nodes) for mode in args.modes for nodes in args.trees if mode == "ours" or nodes is None]
    return pack(
        [
            [
                Candidate(
                    Configuration(
                        mode, pair.target, pair.drafter, backend, draft_window=args.draft_window, nodes=nodes
                    ),
                    workload,
                    pair.is_dummy,
                    pair.share[0],
                )
                for mode, nodes in ways
            ]
            for backend in args.backends
        ]
    )


def summarize(events: list[dict], cycles: int) -> dict:
    """Return means per cycle over the last `cycles` of a trace. Times are in microseconds.

    A cycle begins with one of `BLOCK_KERNELS`. Host calls are those of the scheduler's thread.

    Raises:
        ValueError: the trace has fewer cycles.
    """
    work = sorted((event for event in events if event.get("cat") in GPU_WORK), key=lambda event: event["ts"])
    starts = [event["ts"] for event in work if event["name"].startswith(BLOCK_KERNELS)][-cycles - 1 :]
    if len(starts) <= cycles:
        raise ValueError(f"{len(starts)} kernels named {' or '.join(BLOCK_KERNELS)} in a trace of over {cycles} cycles")
    first, last = starts[0], starts[-1]
    work = [event for event in work if first <= event["ts"] < last]
    replays = {correlation(event) for event in events if event["name"].startswith("cudaGraphLaunch")}
    inside = [event for event in work if correlation(event) in replays]
    wall, gaps = last - first, find_gaps(work, last)
    idle = sum(us for _, us in gaps)
    calls = scheduler_calls(
        [event for event in events if event.get("cat") in HOST_CALLS and first <= event["ts"] < last]
    )

    def per_cycle(rows: list[dict]) -> list[dict]:
        return [row | {"count": row["count"] / cycles, "us": row["us"] / cycles} for row in rows]

    kernels = per_cycle(total_by_name((event["name"][:110], event["dur"]) for event in work))
    graphs = collections.Counter(event["name"][:110] for event in inside)
    for row in kernels:
        row["in_graph"] = graphs[row["name"]] / (row["count"] * cycles)
    host = per_cycle(total_by_name((event["name"], event["dur"]) for event in calls))
    return {
        "cycle_us": statistics.median(b - a for a, b in itertools.pairwise(starts)),
        "mean_cycle_us": wall / cycles,
        "busy_us": (wall - idle) / cycles,
        "gap_us": idle / cycles,
        "launches": len(work) / cycles,
        "launches_outside_graphs": (len(work) - len(inside)) / cycles,
        "us_outside_graphs": (sum(event["dur"] for event in work) - sum(event["dur"] for event in inside)) / cycles,
        "graph_launches": sum(row["count"] for row in host if row["name"].startswith("cudaGraphLaunch")),
        "host_syncs": sum(row["count"] for row in host if row["name"].startswith(HOST_SYNCS)),
        "host_sync_us": sum(row["us"] for row in host if row["name"].startswith(HOST_SYNCS)),
        # The host waits for these too.
        "pageable_copies": sum(row["count"] for row in kernels if "Pageable" in row["name"]),
        "kernels": kernels,
        "gaps": per_cycle(total_by_name(gaps)),
        "host_calls": host,
    }


def correlation(event: dict) -> int | None:
    """Return the number that links GPU work to the call that launched it, for example a graph replay."""
    return event.get("args", {}).get("correlation")


def find_gaps(work: list[dict], end: float) -> list[tuple[str, float]]:
    """Return the times in which nothing runs, in microseconds, named by the work before and after."""
    gaps = []
    busy_until, before = work[0]["ts"], work[0]
    for event in [*work, {"ts": end, "dur": 0.0, "name": work[0]["name"]}]:
        if event["ts"] > busy_until:
            gaps.append((f"{before['name'][:50]} ... {event['name'][:50]}", event["ts"] - busy_until))
        if event["ts"] + event["dur"] >= busy_until:
            busy_until, before = event["ts"] + event["dur"], event
    return gaps


def scheduler_calls(calls: list[dict]) -> list[dict]:
    """Return the calls of the thread that makes most. Other threads of an engine only copy or poll."""
    threads = collections.Counter(event["tid"] for event in calls)
    return [event for event in calls if event["tid"] == max(threads, key=threads.get)]


def total_by_name(named: collections.abc.Iterable[tuple[str, float]]) -> list[dict]:
    """Return the count and the total time of every name, longest first."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    for name, us in named:
        times[name].append(us)
    rows = [{"name": name, "count": len(us), "us": sum(us)} for name, us in times.items()]
    return sorted(rows, key=lambda row: -row["us"])


def report(results: list[dict], top: int) -> str:
    lines = []
    for r in results:
        lines += [
            f"## {r['engine']}, batch {r['batch']}",
            "",
            f"Cycle {r['cycle_us']:.0f} us (mean {r['mean_cycle_us']:.0f}): GPU busy {r['busy_us']:.0f} us, gaps "
            f"{r['gap_us']:.0f} us. {r['launches']:.0f} kernels and copies, {r['launches_outside_graphs']:.0f} of them "
            f"outside graphs ({r['us_outside_graphs']:.0f} us); {r['graph_launches']:.1f} graph launches. The host "
            f"waits {r['host_syncs']:.1f} times ({r['host_sync_us']:.0f} us), and {r['pageable_copies']:.1f} copies "
            "are to or from pageable memory.",
            "",
            "| us per cycle | launches | in graph | kernel |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {k['us']:.1f} | {k['count']:.1f} | {k['in_graph']:.0%} | `{k['name']}` |" for k in r["kernels"][:top]
        ]
        for title, rows in (("gap between", r["gaps"][:15]), ("host call", r["host_calls"][:15])):
            lines += ["", f"| us per cycle | count | {title} |", "|---|---|---|"]
            lines += [f"| {row['us']:.1f} | {row['count']:.1f} | `{row['name']}` |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=[name for name, pair in PAIRS.items() if pair.is_dummy], default="qwen3-8b")
    parser.add_argument("--backends", nargs="+", default=["fa3"])
    parser.add_argument("--modes", nargs="+", choices=["in-tree", "ours"], default=["in-tree", "ours"])
    parser.add_argument("--batch", nargs="+", type=positive, default=[1])
    parser.add_argument("--draft-window", type=positive)
    parser.add_argument("--trees", nargs="+", type=number_or_none, default=[None], help="nodes; none: chains")
    parser.add_argument("--cycles", type=positive, default=12)
    parser.add_argument("--top", type=positive, default=60, help="kernels to list")
    parser.add_argument("--accept-length", type=float, default=6.5)
    parser.add_argument("--models", type=Path, default=Path("/tmp/dflash-dummy-models"))
    parser.add_argument("--traces", type=Path, help="keep the traces in this folder")
    parser.add_argument("--out", type=Path, default=Path("work/profile"), help="without suffix")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results: list[dict] = []
    with tempfile.TemporaryDirectory() as scratch:
        for group in plan(args):
            with running(group, "cuda", args.models) as engines:
                for (candidate, engine), batch in itertools.product(engines, args.batch):
                    name = str(candidate.configuration)
                    folder = (args.traces or Path(scratch)) / f"{name}, batch {batch}".replace(", ", "-").replace(
                        " ", ""
                    )
                    engine.warm_up(Load(0, batch))
                    events = engine.trace(Load(0, batch), LEAD_STEPS + args.cycles, folder)
                    results.append({"engine": name, "batch": batch} | summarize(events, args.cycles))
                    Path(f"{args.out}.md").write_text(report(results, args.top))
                    Path(f"{args.out}.json").write_text(json.dumps(results) + "\n")
    print(report(results, args.top))


if __name__ == "__main__":
    main()
