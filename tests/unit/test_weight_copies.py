"""Copies of weights in fewer bits follow the weights, in the memory that CUDA graphs hold."""

import gc

import torch

from sglang_dflash.ops import weight_copy
from sglang_dflash.ops.reference.argmax_product import quantize_randomly
from sglang_dflash.vocab.bounded import BoundedHead


def test_copy_follows_its_weights():
    weight = torch.randn(3000, 256).bfloat16()
    head = BoundedHead(weight)
    addresses = [tensor.data_ptr() for tensor in head._copy.tensors]
    weight.copy_(weight.flip(0))
    weight_copy.refresh()
    copied = head._copy.tensors
    assert not torch.equal(copied[1], quantize_randomly(weight, torch.Generator().manual_seed(0))[1])

    weight_copy.weights_have_changed()
    weight_copy.refresh()

    assert [tensor.data_ptr() for tensor in copied] == addresses
    numbers, scales, norms = copied
    # Each number is one of the two next to the exact one.
    assert ((weight.float() - numbers * scales[:, None]).abs() <= 1.001 * scales[:, None]).all()
    torch.testing.assert_close(norms, (numbers * scales[:, None]).norm(dim=-1))


def test_dropped_copies_are_not_filled():
    others = set(weight_copy._copies)
    head = BoundedHead(torch.randn(8, 256))
    assert set(weight_copy._copies) - others == {head._copy}
    del head
    gc.collect()
    assert set(weight_copy._copies) == others
