"""The kernel of scripts/bench_linear.py, which is timed on a GPU, multiplies right."""

import pytest
import torch
from bench_linear import DTYPE, Config, Linear, check


@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 64, 64), (16, 130, 520), (19, 7, 200)])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tma", [False, True])
def test_linear(rows, columns, depth, splits, tma, device):
    x, weight = (torch.randn(n, depth, device=device).to(DTYPE) for n in (rows, columns))
    linear = Linear(Config(64, 64, stages=3, warps=4, splits=splits, tma=tma), rows, columns)

    check(linear, x, weight, x.float() @ weight.float().T)
    with pytest.raises(AssertionError, match="off by"):
        check(linear, x, weight, x.float() @ weight.float().T + 1)
