import time

import pytest
import torch

from sglang_dflash.ops.kernels.read_clock import read_clock
from sglang_dflash.ops.reference.read_clock import read_clock as reference


def test_counts_nanoseconds(device):
    if device == "cpu":
        pytest.skip("needs a CUDA GPU: Triton's interpreter has no clock")
    times, expected = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(2, dtype=torch.int64)
    for point in range(2):
        torch.cuda.synchronize()
        read_clock(times, point)
        torch.cuda.synchronize()
        reference(expected, point)
        time.sleep(0.2)
    assert times.diff().item() == pytest.approx(expected.diff().item(), rel=0.2)
