"""The CPU operators against plain loops."""

import pytest
import torch

from sglang_dflash_cpu.platform import cpu_engine

if not cpu_engine():
    pytest.skip("needs SGLANG_USE_CPU_ENGINE=1 and no CUDA device", allow_module_level=True)

from sglang_dflash_cpu import sgl_kernel


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pool_and_locs_round_trip(dtype):
    start = torch.tensor([3, 0, 7, 2], dtype=dtype)
    end = torch.tensor([6, 0, 12, 3], dtype=dtype)
    rows = torch.tensor([4, 1, 2, 0])
    pool = torch.full((5, 20), -1, dtype=torch.int32)
    slots = torch.arange(100, 109)
    sgl_kernel.assign_req_to_token_pool_cpu(rows, pool, start, end, slots, 20)
    expected, at = torch.full((5, 20), -1, dtype=torch.int32), 0
    for row, s, e in zip(rows.tolist(), start.tolist(), end.tolist()):
        for column in range(s, e):
            expected[row, column] = slots[at]
            at += 1
    assert torch.equal(pool, expected)
    out = torch.full((12,), 7)
    sgl_kernel.assign_extend_cache_locs_cpu(rows, pool, start, end, out, 20)
    assert out.tolist() == [*range(100, 109), 7, 7, 7]


def test_draft_locs():
    pool = torch.arange(40, dtype=torch.int32).view(2, 20)
    out = torch.empty(8, dtype=torch.int64)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(torch.tensor([1, 0]), pool, torch.tensor([3, 5]), out, 20, 2, 2)
    assert out.tolist() == [23, 24, 25, 26, 5, 6, 7, 8]


def test_copy_all_layers():
    buffers = [torch.randn(10, 3, 5), torch.randn(10, 2, 4).to(torch.bfloat16)]
    before = [b.clone() for b in buffers]
    pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)
    strides = torch.tensor([b[0].nbytes for b in buffers])
    source, target = torch.tensor([1, 2, 3]), torch.tensor([2, 3, 9])
    sgl_kernel.copy_all_layer_kv_cache_cpu(pointers, strides, target, source)
    sgl_kernel.copy_all_layer_kv_cache_cpu(pointers, strides, target[:0], source[:0])
    for b, old in zip(buffers, before):
        expected = old.clone()
        expected[target] = old[source]
        assert torch.equal(b, expected)


def test_accepted():
    tokens, bonus = torch.arange(12), torch.empty(3, dtype=torch.int64)
    sgl_kernel.fill_bonus_tokens_cpu(tokens, torch.tensor([1, 4, 2], dtype=torch.int32), bonus, 4)
    assert bonus.tolist() == [0, 7, 9]
    out = torch.zeros(6, dtype=torch.int64)
    index = torch.tensor([[0, -1, -1], [3, 4, -1]], dtype=torch.int32)
    sgl_kernel.fill_accept_out_cache_loc_cpu(index, torch.arange(50, 56), out)
    assert out.tolist() == [50, 53, 54, 0, 0, 0]
