"""Copies of weights in fewer bits follow the weights, in the memory that CUDA graphs hold."""

import torch

from sglang_dflash.draft.shortlist import Shortlist
from sglang_dflash.ops import weight_copy
from sglang_dflash.ops.reference.argmax_product import quantize_randomly
from sglang_dflash.ops.reference.shortlist_top import Float8Copy, Int4Copy
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
    head, shortlist = BoundedHead(torch.randn(8, 256)), Shortlist(torch.randn(100, 256), 1)
    assert set(weight_copy._copies) - others == {head._copy, *shortlist._copies}
    del head, shortlist
    # Without a look for cycles.
    assert set(weight_copy._copies) == others


def test_copies_of_a_shortlist_follow_its_weights():
    weight = torch.randn(300, 512).bfloat16()
    shortlist = Shortlist(weight, 4)
    addresses = [tensor.data_ptr() for copy in (shortlist.int4, shortlist.float8) for tensor in tensors_of(copy)]
    weight[:, 5] *= 100
    weight.copy_(weight.flip(0))
    weight_copy.weights_have_changed()
    weight_copy.refresh()

    expected = Shortlist(weight.clone(), 4)
    for mine, others in ((shortlist.int4, expected.int4), (shortlist.float8, expected.float8)):
        for tensor, other in zip(tensors_of(mine), tensors_of(others), strict=True):
            assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))
            assert tensor.data_ptr() in addresses


def tensors_of(copy: Int4Copy | Float8Copy) -> list[torch.Tensor]:
    return list(vars(copy).values())
