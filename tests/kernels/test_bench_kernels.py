"""scripts/bench_kernels.py launches every kernel, and checks it against its reference."""

import bench_kernels
import pytest

SIZES = ("--vocab", "600", "--window", "16", "--context", "60")


@pytest.fixture(autouse=True)
def small_shapes(monkeypatch):
    """Shrink matrices, heads, recurrent states and pools, which would take the interpreter minutes."""
    sizes = {
        "Q_HEADS": 8,
        "KV_HEADS": 2,
        "HIDDEN": 256,
        "INTERMEDIATE": 1024,
        "KEY_HEADS": 1,
        "VALUE_HEADS": 2,
        "LINEAR_LAYERS": 2,
        "TARGET_LAYERS": 2,
    }
    for name, count in sizes.items():
        monkeypatch.setattr(bench_kernels, name, count)


@pytest.mark.parametrize("make", bench_kernels.KERNELS, ids=lambda make: make.__name__)
def test_check(make):
    args = bench_kernels.parse(SIZES)

    bench_kernels.check(make.__name__, *(bench_kernels.build(make, 2, args, seed=0) for _ in range(2)))


@pytest.mark.parametrize("make", bench_kernels.KERNELS, ids=lambda make: make.__name__)
def test_inputs_that_differ_are_noticed(make):
    args = bench_kernels.parse(SIZES)

    with pytest.raises(AssertionError, match=make.__name__):
        bench_kernels.check(make.__name__, *(bench_kernels.build(make, 2, args, seed) for seed in range(2)))
