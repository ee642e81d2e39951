"""scripts/bench_linear.py compares what computes the same."""

import bench_linear
import pytest


def test_measures_what_is_right(monkeypatch):
    monkeypatch.setattr(bench_linear, "TILES", bench_linear.TILES[:2])
    row = bench_linear.measure(3, "48x300 gated")
    assert {"cuBLAS", "ours"} < set(row["us"])
    assert row["bytes"] == 2 * (96 * 300 + 3 * 300 + 3 * 48)

    monkeypatch.setattr(bench_linear.kernel, "linear_few_rows", lambda x, weight, is_gated: x[:, :48])
    with pytest.raises(AssertionError, match="ours: off by"):
        bench_linear.measure(3, "48x300 gated")
