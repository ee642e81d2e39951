"""scripts/bench_linear.py compares implementations that compute the same."""

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


def test_measures_a_layer(monkeypatch):
    """All layers use the package's kernel for 3 rows; only the gated layer does for 96."""
    for name, value in {"HIDDEN": 64, "HEADS": 1, "HEAD_DIM": 64}.items():
        monkeypatch.setattr(bench_linear, name, value)
    monkeypatch.setattr(bench_linear, "LAYER", ["192x64", "64x64", "96x64 gated", "64x96"])
    ours = []
    kernel = bench_linear.kernel.linear_few_rows
    monkeypatch.setattr(
        bench_linear.kernel, "linear_few_rows", lambda x, *rest: ours.append(len(x)) or kernel(x, *rest)
    )
    for rows in (3, 96):
        assert set(bench_linear.measure_layer(rows)) == {"cuBLAS", "ours"}
    assert ours == [3, 3, 3, 3, 96]
