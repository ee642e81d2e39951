"""The kernels that scripts/bench_linear.py times on a GPU are right."""

from functools import partial

import pytest
import torch
from bench.few_rows import DTYPE, Config, Linear, add_norm, in_torch
from bench_linear import check

SHAPES = pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 64, 64), (16, 130, 520), (19, 7, 200)])


def problem(rows: int, columns: int, depth: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x, rows of a wider matrix as queries are of projections, and a weight."""
    x = torch.randn(rows, depth + 8, device=device).to(DTYPE)[:, :depth]
    return x, torch.randn(columns, depth, device=device).to(DTYPE) / depth**0.5


@SHAPES
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("tma", [False, True])
def test_linear(rows, columns, depth, splits, is_gated, tma, device):
    x, weight = problem(rows, (1 + is_gated) * columns, depth, device)
    linear = Linear(Config(64, 64, stages=3, warps=4, splits=splits, tma=tma), rows, columns, is_gated)
    want = in_torch(x, weight, is_gated)

    check(partial(linear, x, weight), "linear", want)
    with pytest.raises(AssertionError, match="off by"):
        check(partial(linear, x, weight), "linear", want + 1)


@SHAPES
def test_linear_in_parts(rows, columns, depth, device):
    x, weight = problem(rows, columns, depth, device)
    linear = Linear(Config(64, 64, stages=3, warps=4, splits=3, tma=False), rows, columns, in_parts=True)

    assert linear(x, weight).shape == (3, rows, columns)
    check(lambda: linear(x, weight).sum(dim=0), "linear in parts", in_torch(x, weight, is_gated=False))


@pytest.mark.parametrize("parts", [None, 2, 3])
def test_add_norm(parts, device):
    x = torch.randn((5, 64) if parts is None else (parts, 5, 64), device=device)
    x = x.to(DTYPE) if parts is None else x
    residual, weight = torch.randn(5, 64, device=device).to(DTYPE), torch.rand(64, device=device).to(DTYPE)
    total = (x.float() if parts is None else x.sum(dim=0)) + residual.float()
    normed = total * torch.rsqrt(total.square().mean(dim=1, keepdim=True) + 1e-6) * weight.float()

    out = add_norm(x, residual, weight, "no")

    for got, want in ((out, normed), (residual, total)):
        assert (got.float() - want).norm() < 2**-7 * want.norm()
