import pytest
import torch

from sglang_dflash.ops.kernels import top_columns as kernels
from sglang_dflash.ops.kernels.top_columns import top_columns
from sglang_dflash.ops.reference.top_columns import top_columns as reference


def assert_same(got, want):
    for mine, theirs in zip(got[:2], want[:2]):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    torch.testing.assert_close(got[2], want[2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "columns", "k"),
    [(0, 10, 4), (1, 1, 1), (2, 7, 5), (3, 16, 16), (2, 1025, 3), (3, 3001, 8), (1, 8192, 16), (17, 130, 2)],
)
def test_matches_reference(rows, columns, k, dtype, device):
    # Few different values, so that almost every row has several of each.
    values = torch.randint(-20, 20, (rows, columns + 7), device=device).to(dtype)[:, :columns]
    assert_same(top_columns(values, k), reference(values, k))


def test_a_vocabulary(device):
    values = (5 * torch.randn(1, 151936, device=device)).bfloat16()
    assert_same(top_columns(values, 8), reference(values, 8))


@pytest.mark.parametrize("warps", [1, 7])
def test_few_parts_of_many_tiles(warps, monkeypatch, device):
    """Parts have many tiles, as with more rows than the interpreter can process."""
    monkeypatch.setattr(kernels, "_ENOUGH_WARPS", warps)
    values = torch.randint(-99, 99, (2, 39000), device=device).bfloat16()
    assert_same(top_columns(values, 8), reference(values, 8))


@pytest.mark.parametrize("first", [0, 8, 1024, 2040, 4999 - 8 * 3])
@pytest.mark.parametrize("step", [1, 3, 8])
def test_neighbours(first, step, device):
    """One thread reads the largest values of a row, or several threads do."""
    values = torch.randn(2, 5000, device=device).bfloat16()
    want = first + step * torch.arange(4, device=device)
    values[1, want] = torch.tensor([9.0, 8.0, 8.0, 7.0], device=device).bfloat16()
    largest, columns, _ = top_columns(values, 4)
    assert largest[1].tolist() == [9.0, 8.0, 8.0, 7.0] and torch.equal(columns[1], want)


def test_equal_values_in_the_order_of_columns(device):
    values = torch.zeros(2, 5000, device=device)
    # One zero is not larger than the other.
    values[1, ::3] = -0.0
    assert top_columns(values, 16)[1].tolist() == [list(range(16))] * 2


def test_large_and_small_values(device):
    values = torch.full((3, 3000), -3e38, device=device)
    values[0] = 1e4 + torch.rand(3000, device=device)
    values[1, 2500] = -1e6
    values[2, 7:11] = torch.randn(4, device=device)
    assert_same(top_columns(values, 5), reference(values, 5))


def test_only_infinities_and_nan(device):
    """Whatever a broken model computes, the columns are different ones of the vocabulary."""
    values = torch.full((3, 2500), float("nan"), device=device)
    values[1] = float("-inf")
    values[2, 2000] = -3.0
    largest, columns, _ = top_columns(values, 3)
    assert columns.tolist() == [[0, 1, 2], [0, 1, 2], [2000, 0, 1]]
    assert largest[2, 0] == -3.0
