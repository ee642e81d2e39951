"""float8_e4m3fn decoded by bits, for GPUs without an instruction for it."""

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.kernels.fp8 import decode_e4m3


@triton.jit
def _decode_kernel(source, output, N: tl.constexpr):
    offset = tl.arange(0, N)
    tl.store(output + offset, decode_e4m3(tl.load(source + offset)))


def test_all_bytes_are_what_torch_makes_of_them(device):
    numbers = torch.arange(256, dtype=torch.uint8, device=device)
    got = torch.empty(256, dtype=torch.float16, device=device)
    _decode_kernel[(1,)](numbers, got, 256)

    want = numbers.view(torch.float8_e4m3fn).to(torch.float32)
    assert torch.equal(got.isnan(), want.isnan()) and int(want.isnan().sum()) == 2
    known = ~want.isnan()
    assert torch.equal(got.float()[known], want[known])
    # Zeros keep their signs.
    assert torch.equal(got.signbit()[known], want.signbit()[known])
