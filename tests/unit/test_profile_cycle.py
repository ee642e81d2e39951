"""scripts/profile_cycle.py: summary of a trace."""

import pytest
from profile_cycle import report, summarize

SCHEDULER, COPIER = 1, 2


REPLAY, LAUNCH = 7, 8


def kernel(name: str, ts: float, dur: float, graph: bool = False, cat: str = "kernel") -> dict:
    launched_by = {"correlation": REPLAY if graph else LAUNCH}
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": launched_by}


def call(name: str, ts: float, dur: float, tid: int = SCHEDULER) -> dict:
    correlation = REPLAY if name == "cudaGraphLaunch" else LAUNCH
    return {"cat": "cuda_runtime", "name": name, "ts": ts, "dur": dur, "tid": tid, "args": {"correlation": correlation}}


def cycle(start: float, graph: bool) -> list[dict]:
    """Return a cycle of 100 us, 30 of them in three gaps. The matrix product and the copy overlap."""
    return [
        kernel("_prepare_block_kernel", start, 10, graph),
        kernel("gemm", start + 20, 40, graph),
        kernel("Memcpy DtoH (Device -> Pageable)", start + 30, 5, cat="gpu_memcpy"),
        kernel("norm", start + 70, 20, graph),
        call("cudaGraphLaunch", start + 2, 8),
        call("cudaStreamSynchronize", start + 12, 30),
        call("cudaLaunchKernel", start + 50, 4),
        call("cudaEventSynchronize", start + 1, 90, COPIER),
    ]


@pytest.mark.parametrize("graph", [True, False])
def test_summary(graph):
    """The kernel that begins a cycle may be in a graph. Only the last three cycles count."""
    prefill = [kernel("prefill", -500, 400), {"cat": "python_function", "name": "f", "ts": 0.0}]
    events = [*prefill, *(event for i in range(6) for event in cycle(100.0 * i, graph))]

    summary = summarize(events, cycles=3)

    figures = {name: value for name, value in summary.items() if not isinstance(value, list)}
    assert figures == {
        "cycle_us": 100,
        "mean_cycle_us": 100,
        "busy_us": 70,
        "gap_us": 30,
        "launches": 4,
        "launches_outside_graphs": 1 if graph else 4,
        "us_outside_graphs": 5 if graph else 75,
        "graph_launches": 1,
        "host_syncs": 1,
        "host_sync_us": 30,
        "pageable_copies": 1,
    }
    assert summary["kernels"][0] == {"name": "gemm", "count": 1, "us": 40, "in_graph": float(graph)}
    assert {gap["name"]: gap["us"] for gap in summary["gaps"]} == {
        "_prepare_block_kernel ... gemm": 10,
        "gemm ... norm": 10,
        "norm ... _prepare_block_kernel": 10,
    }
    assert [row["name"] for row in summary["host_calls"]] == [
        "cudaStreamSynchronize",
        "cudaGraphLaunch",
        "cudaLaunchKernel",
    ]
    text = report([{"engine": "ours, fa3, tp 1", "batch": 1} | summary], top=2)
    assert "## ours, fa3, tp 1, batch 1" in text and "`norm`" in text and "`cudaGraphLaunch`" in text


def test_a_trace_that_is_too_short():
    with pytest.raises(ValueError, match=r"3 kernels named _prepare_block_kernel or .* over 3 cycles"):
        summarize([event for i in range(3) for event in cycle(100.0 * i, True)], cycles=3)
