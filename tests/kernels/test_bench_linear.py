"""The kernel of scripts/bench_linear.py, which is timed on a GPU, multiplies right."""

import pytest
import torch
from bench_linear import DTYPE, Config, Linear, check, in_torch


@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 64, 64), (16, 130, 520), (19, 7, 200)])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("tma", [False, True])
def test_linear(rows, columns, depth, splits, is_gated, tma, device):
    # Rows of a wider matrix, as queries are of projections.
    x = torch.randn(rows, depth + 8, device=device).to(DTYPE)[:, :depth]
    weight = torch.randn((1 + is_gated) * columns, depth, device=device).to(DTYPE) / depth**0.5
    linear = Linear(Config(64, 64, stages=3, warps=4, splits=splits, tma=tma), rows, columns, is_gated)
    want = in_torch(x, weight, is_gated)

    check(linear, x, weight, want)
    with pytest.raises(AssertionError, match="off by"):
        check(linear, x, weight, want + 1)
