"""float8_e4m3fn on GPUs that have no instruction for it: those before compute capability 8.9."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl


@cache
def has_e4m3(device: torch.device) -> bool:
    """Return whether Triton loads and converts float8_e4m3fn; in the interpreter it does."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def decode_e4m3(byte):
    """Return the float16 numbers of float8_e4m3fn bytes, exactly.

    float16 has the same bits for the same number times 2**-8: one more bit of the exponent, whose bias is 8 larger.
    Only NaN, all ones in e4m3, has other bits.
    """
    magnitude = (byte & 0x7F).to(tl.uint16)
    bits = tl.where(magnitude == 0x7F, 0x7E00, magnitude << 7).to(tl.uint16) | ((byte & 0x80).to(tl.uint16) << 8)
    return bits.to(tl.float16, bitcast=True) * 256.0
