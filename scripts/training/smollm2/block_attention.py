"""Which keys the rows of many blocks see, in the form that attends fast: whole tiles are skipped.

Legend of shapes: N sequences, T tokens each, A anchors per sequence, B block size.
"""

from collections.abc import Callable

import torch
from support.oracle.drafter import Mask
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

TILE = 128


def block_mask(anchors: Tensor, sizes: Tensor, length: int, block_size: int) -> Mask:
    """The mask of drafting, in which blocks may be cut: rows from a block's size on are seen by none.

    Args:
        anchors: [N, A] int64, ascending, so that tiles have near ones.
        sizes: [N, A] int64 in 1..B.
        length: T.

    Returns:
        Of A * B rows over T + A * B keys; on a CPU [N, 1, A * B, T + A * B] bool.

    Raises:
        ValueError: on a GPU, tokens or rows do not fill tiles.
    """
    num_sequences, num_anchors = anchors.shape
    num_rows = num_anchors * block_size
    is_visible = visible_keys(anchors, sizes, length, block_size)
    if not anchors.is_cuda:
        return create_mask(is_visible, num_sequences, None, num_rows, length + num_rows, anchors.device)
    if length % TILE or num_rows % TILE or TILE % block_size:
        raise ValueError(f"{length} tokens and {num_rows} rows, in blocks of {block_size}, do not fill tiles of {TILE}")
    return BlockMask.from_kv_blocks(
        *tile_lists(anchors, length, block_size),
        BLOCK_SIZE=TILE,
        mask_mod=is_visible,
        seq_lengths=(num_rows, length + num_rows),
    )


def visible_keys(anchors: Tensor, sizes: Tensor, length: int, block_size: int) -> Callable[..., Tensor]:
    """(sequence, head, row, key) -> whether the row sees the key; see :func:`block_mask`."""

    def is_visible(sequence: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        block, in_block = row // block_size, key - length
        is_own = (in_block // block_size == block) & (in_block % block_size < sizes[sequence, block])
        return torch.where(key < length, key < anchors[sequence, block], is_own)

    return is_visible


def tile_lists(anchors: Tensor, length: int, block_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tiles of keys that a tile of rows sees partly, and those that it sees wholly.

    Returns:
        For each kind, [N, 1, rows / TILE] int32, how many, and [N, 1, rows / TILE, keys / TILE] int32, which, first.
    """
    of_tile = anchors.unflatten(1, (-1, TILE // block_size))
    starts = torch.arange(0, length, TILE, device=anchors.device)
    is_whole = starts + TILE <= of_tile.amin(-1, keepdim=True)
    is_partial = (starts < of_tile.amax(-1, keepdim=True)) & ~is_whole
    num_tiles = of_tile.shape[1]
    is_own = torch.eye(num_tiles, dtype=torch.bool, device=anchors.device).expand(len(anchors), -1, -1)
    lists = []
    for is_seen in (torch.cat([is_partial, is_own], dim=-1), torch.cat([is_whole, torch.zeros_like(is_own)], dim=-1)):
        order = is_seen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        lists += [is_seen.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]]
    return tuple(lists)
