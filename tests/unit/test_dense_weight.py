"""The weight that a quantised layer multiplies by, as the context's projections get it."""

import pytest
import torch
from torch import nn

from sglang_dflash.draft.context import dense_weight

FLOAT8 = torch.finfo(torch.float8_e4m3fn)


class StaticInputs:
    """A method that rounds inputs to float8 by the layer's static scale, as a GPU does."""

    def apply(self, layer, x, bias):
        rounded = (x.float() / layer.input_scale).clamp(FLOAT8.min, FLOAT8.max).to(torch.float8_e4m3fn)
        return (rounded.float() * layer.input_scale @ layer.weight.float().t()).to(x.dtype)


@pytest.mark.parametrize("scale", [0.0007, 0.0123, 0.3, 5.0])
def test_static_scales_of_inputs(scale):
    """A 1 would be clipped where the scale is small, and rounded to three bits elsewhere."""
    layer = nn.Module()
    layer.quant_method, layer.input_size, layer.params_dtype = StaticInputs(), 40, torch.bfloat16
    weight = torch.randn(24, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
    layer.register_parameter("input_scale", nn.Parameter(torch.tensor(scale), requires_grad=False))

    torch.testing.assert_close(dense_weight(layer), weight, rtol=0.01, atol=0)
