"""Mask of the keys that the tokens of many blocks see, in a form whose attention skips whole tiles.

Letters in shapes: bs sequences, T tokens each, A anchors per sequence, W block width.
"""

from collections.abc import Callable

import torch
from support.oracle.drafter import Mask
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

TILE = 128


def block_mask(anchors: Tensor, sizes: Tensor, length: int, block_size: int) -> Mask:
    """Return the mask of drafting for blocks that may be cut: no token sees tokens from a block's size on.

    Args:
        anchors: [bs, A] int64, ascending, so that the anchors of a tile are close together.
        sizes: [bs, A] int64 in 1..W.
        length: T.
        block_size: W.

    Returns:
        A mask of A * W queries over T + A * W keys. On a CPU [bs, 1, A * W, T + A * W] bool.

    Raises:
        ValueError: on a GPU, the tokens or the queries do not fill tiles.
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
    """Return a function of (sequence, head, query, key): whether the query sees the key. See :func:`block_mask`."""

    def is_visible(sequence: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        block, in_block = row // block_size, key - length
        is_own = (in_block // block_size == block) & (in_block % block_size < sizes[sequence, block])
        return torch.where(key < length, key < anchors[sequence, block], is_own)

    return is_visible


def tile_lists(anchors: Tensor, length: int, block_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the tiles of keys that a tile of queries sees partly, and those that it sees wholly.

    Returns:
        For each kind, the number of tiles [bs, 1, query tiles] int32, and their indices
        [bs, 1, query tiles, key tiles] int32, of which the first count.
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
