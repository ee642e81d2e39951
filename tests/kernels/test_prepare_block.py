import pytest
import torch

from sglang_dflash.ops.kernels.prepare_block import prepare_block
from sglang_dflash.ops.reference.prepare_block import prepare_block as reference
from sglang_dflash.types import Block, DrawParameters


@pytest.mark.parametrize("has_chains", [False, True])
@pytest.mark.parametrize("is_greedy", [False, True])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("bs", [0, 1, 3, 33])
@pytest.mark.parametrize("block_size", [2, 8, 10, 16])
def test_matches_reference(bs, block_size, padding, is_greedy, has_chains, device):
    width = 97
    req_to_token = torch.randint(0, 10**6, (bs + 2, width), dtype=torch.int32, device=device)
    # A view with its own row stride, as a slice of a larger pool.
    req_to_token = torch.cat([req_to_token, req_to_token], dim=1)[:, :width]
    parameters = DrawParameters(
        torch.rand(bs, device=device),
        torch.randint(0, 9, (bs,), dtype=torch.int32, device=device),
        *torch.rand(2, bs, device=device),
    )
    args = (
        torch.randint(0, 150000, (bs,), device=device),
        torch.randint(0, width - block_size + 1, (bs,), device=device),
        torch.randperm(bs + 2, device=device)[:bs],
        req_to_token,
        151669,
        None if is_greedy else parameters,
        torch.randint(0, 2**62, (bs + 2,), device=device),
        is_greedy,
        torch.randint(0, 2, (bs,), device=device) if has_chains else None,
    )
    got, want = (Block.empty(bs + padding, block_size, device) for _ in range(2))
    for block in (got, want):
        # Values that the last cycle left.
        for tensor in (block.keys, block.advances_states, block.is_chain, *vars(block.parameters).values()):
            tensor.fill_(77)
    prepare_block(*args, got)
    reference(*args, want)
    torch.testing.assert_close(tensors(got), tensors(want), rtol=0, atol=0)


def tensors(block: Block) -> dict:
    return vars(block) | {"parameters": vars(block.parameters)}


def test_last_positions_of_a_row_stay_in_the_row(device):
    req_to_token = torch.arange(3 * 20, dtype=torch.int32, device=device).view(3, 20)
    bonus, seq_lens, rows = (torch.tensor([value], device=device) for value in (7, 12, 1))
    block, keys = Block.empty(1, 8, device), torch.zeros(3, dtype=torch.int64, device=device)
    prepare_block(bonus, seq_lens, rows, req_to_token, 5, None, keys, True, None, block)
    assert block.input_ids.tolist() == [7] + [5] * 7
    assert block.positions.tolist() == list(range(12, 20))
    assert block.out_cache_loc.tolist() == list(range(32, 40))


def test_padding_is_harmless(device):
    """Padded requests read and write only slots that SGLang reserves for padding."""
    req_to_token = torch.full((3, 20), 9, dtype=torch.int32, device=device)
    block, keys = Block.empty(2, 4, device), torch.tensor([3, 2**62 + 5, 4], device=device)
    bonus, seq_lens, rows = (torch.tensor([value], device=device) for value in (7, 12, 1))
    prepare_block(bonus, seq_lens, rows, req_to_token, 5, None, keys, True, None, block)
    assert block.seq_lens.tolist() == [12, 1] and block.req_pool_indices.tolist() == [1, 0]
    assert block.out_cache_loc.tolist() == [9] * 4 + [0] * 4
    assert block.keys.tolist() == [2**62 + 5, 3]


def test_requests_are_drawn_as_they_ask_and_padding_is_greedy(device):
    req_to_token = torch.zeros((2, 20), dtype=torch.int32, device=device)
    bonus, seq_lens, rows = (torch.tensor([value], device=device) for value in (7, 12, 1))
    temperatures, top_ps, min_ps = (torch.tensor([value], device=device) for value in (0.75, 0.25, 0.5))
    top_ks = torch.tensor([40], dtype=torch.int32, device=device)
    parameters = DrawParameters(temperatures, top_ks, top_ps, min_ps)
    block, keys = Block.empty(2, 4, device), torch.zeros(2, dtype=torch.int64, device=device)
    prepare_block(bonus, seq_lens, rows, req_to_token, 5, parameters, keys, False, None, block)
    values = [values.tolist() for values in vars(block.parameters).values()]
    assert values == [[0.75, 1.0], [40, 1], [0.25, 1.0], [0.5, 0.0]]
    prepare_block(bonus, seq_lens, rows, req_to_token, 5, None, keys, True, None, block)
    assert block.parameters.top_ks.tolist() == [1, 1]


def test_chains_are_told_and_padding_has_none(device):
    req_to_token = torch.zeros((3, 20), dtype=torch.int32, device=device)
    bonus, seq_lens, rows = (torch.tensor(values, device=device) for values in ([7, 8], [12, 3], [1, 2]))
    block, keys = Block.empty(3, 4, device), torch.zeros(3, dtype=torch.int64, device=device)
    for told, chains in ((torch.tensor([0, 1], device=device), [0, 1, 0]), (None, [0, 0, 0])):
        block.is_chain.fill_(77)
        prepare_block(bonus, seq_lens, rows, req_to_token, 5, None, keys, True, told, block)
        assert block.is_chain.tolist() == chains
