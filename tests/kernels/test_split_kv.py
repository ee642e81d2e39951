import pytest
import torch

from sglang_dflash.ops.kernels.split_kv import split_kv
from sglang_dflash.ops.reference.split_kv import split_kv as reference
from sglang_dflash.types import KVSplit


def empty(bs: int, block_size: int, num_slots: int, device: str) -> KVSplit:
    def ints(n: int) -> torch.Tensor:
        return torch.full((n,), -1, dtype=torch.int32, device=device)

    return KVSplit(
        request_indices=ints(num_slots),
        qo_tile_indices=ints(num_slots),
        kv_tile_indices=ints(num_slots),
        block_valid_mask=torch.ones(num_slots, dtype=torch.bool, device=device),
        o_indptr=ints(bs + 1),
        merge_indptr=ints(bs * block_size + 1),
        kv_chunk_size=ints(1),
    )


@pytest.mark.parametrize("window", [None, 50, 1024])
@pytest.mark.parametrize(("block_size", "rows_per_token", "rows_per_tile"), [(16, 4, 64), (16, 8, 64), (10, 3, 16)])
@pytest.mark.parametrize(
    "seq_lens", [[1], [5000], [131_000], [1, 112, 113, 127, 128], [600] * 33, [1, 30_000, 7, 500]], ids=len
)
def test_matches_reference(seq_lens, block_size, rows_per_token, rows_per_tile, window, device):
    num_tiles = -(-block_size * rows_per_token // rows_per_tile)
    max_entries = 33
    num_slots = max(max_entries, num_tiles * len(seq_lens)) + 5
    got, want = (empty(len(seq_lens), block_size, num_slots, device) for _ in range(2))
    lens = torch.tensor(seq_lens, device=device)
    args = (lens, window, block_size, rows_per_token, rows_per_tile, max_entries)
    split_kv(*args, got)
    reference(*args, want)
    torch.testing.assert_close(vars(got), vars(want), rtol=0, atol=0)


def test_covers_every_request(device):
    """Chunks of each tile of a request are numbered from 0 and reach the request's last key."""
    seq_lens, block_size = [1, 3000, 700], 16
    split = empty(3, block_size, 40, device)
    split_kv(torch.tensor(seq_lens, device=device), None, block_size, 8, 64, 33, split)
    num_entries, chunk = int(split.block_valid_mask.sum()), int(split.kv_chunk_size)
    columns = (split.request_indices, split.qo_tile_indices, split.kv_tile_indices)
    entries = [tuple(int(column[i]) for column in columns) for i in range(num_entries)]
    chunks = [-(-(seq_len + block_size) // chunk) for seq_len in seq_lens]
    assert entries == [(r, q, k) for r in range(3) for q in range(2) for k in range(chunks[r])]
    assert num_entries <= 33
