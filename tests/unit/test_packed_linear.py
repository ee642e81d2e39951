"""Weights packed for oneDNN multiply as the original weights do."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from sglang_dflash_cpu import packed_linear
from sglang_dflash_cpu.packed_linear import MAX_ROWS, PackedEmbeddingMethod, PackedLinearMethod

METHODS = [PackedLinearMethod, PackedEmbeddingMethod]


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return nn.Linear(520, 700)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 16, MAX_ROWS, MAX_ROWS + 1])
def test_products(layer, method, has_bias, rows):
    x, bias = torch.randn(2 * rows, 520)[::2], layer.bias if has_bias else None
    torch.testing.assert_close(method().apply(layer, x, bias), functional.linear(x, layer.weight, bias))


@pytest.mark.parametrize("method", METHODS)
def test_changed_weights_are_read_anew(layer, method):
    method, x = method(), torch.randn(4, 520)
    method.apply(layer, x)
    layer.weight.data.copy_(torch.randn_like(layer.weight) / 520**0.5)
    packed_linear.forget_weights()
    torch.testing.assert_close(method.apply(layer, x), functional.linear(x, layer.weight))
