import pytest
import torch

from sglang_dflash.ops.kernels.row_max import row_max
from sglang_dflash.ops.reference.row_max import row_max as reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "columns"), [(0, 10), (1, 1), (1, 4097), (3, 151936), (15, 9001), (600, 5000), (16, 2048)]
)
def test_matches_reference(rows, columns, dtype, device):
    # Few different values, so that almost every row has several maxima.
    values = torch.randint(-20, 20, (rows, columns + 7), device=device).to(dtype)[:, :columns]
    torch.testing.assert_close(row_max(values), reference(values), rtol=0, atol=0)


@pytest.mark.parametrize("column", [0, 4095, 4096, 9000])
def test_finds_every_column(column, device):
    values = torch.zeros(2, 9001, device=device)
    values[1, column] = 1.0
    maxima, columns = row_max(values)
    assert maxima.tolist() == [0.0, 1.0] and columns.tolist() == [0, column]


def test_only_infinities_and_nan(device):
    """The token is in the vocabulary, even if a broken model computes NaN or infinity."""
    values = torch.full((3, 9001), float("nan"), device=device)
    values[1] = float("-inf")
    values[2, 5000] = -3.0
    maxima, columns = row_max(values)
    assert columns.tolist() == [0, 0, 5000]
    assert maxima[2] == -3.0
