"""Acceptance of a path of a draft tree, in one launch with one warp per request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.types import Acceptance

# A warp reduces a vector of this size in one instruction, and a smaller one in several.
_WARP = 32


@triton.jit
def _accept_paths_kernel(
    tokens,
    parents,
    target_tokens,
    seq_lens,
    out_tokens,
    accept_lens,
    bonus_tokens,
    new_seq_lens,
    paths,
    NUM_NODES: tl.constexpr,
    MAX_LEN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    valid = lane < NUM_NODES
    base = request * NUM_NODES
    token = tl.load(tokens + base + lane, mask=valid, other=0)
    parent = tl.load(parents + base + lane, mask=valid, other=-1)
    chosen = tl.load(target_tokens + base + parent, mask=parent >= 0, other=0)
    # The parent of each node that holds the target's token after that parent.
    right_behind = tl.where(token == chosen, parent, -1).to(tl.int32)
    # WIDTH stands for no node.
    node = tl.full((), 0, tl.int32)
    path = lane * 0
    accept_len = tl.full((), 0, tl.int64)
    for index in range(MAX_LEN):
        path = tl.where(lane == index, node, path)
        accept_len += (node < WIDTH).to(tl.int64)
        node = tl.min(tl.where(right_behind == node, lane, WIDTH))

    is_accepted = lane < accept_len
    path = tl.where(is_accepted, path, lane)
    out_token = tl.load(target_tokens + base + path, mask=is_accepted, other=0)
    in_row = lane < MAX_LEN
    tl.store(out_tokens + request * MAX_LEN + lane, out_token, mask=in_row)
    tl.store(paths + request * MAX_LEN + lane, path.to(tl.int64), mask=in_row)
    tl.store(bonus_tokens + request + lane * 0, out_token, mask=lane == accept_len - 1)
    tl.store(accept_lens + request, accept_len)
    tl.store(new_seq_lens + request, tl.load(seq_lens + request) + accept_len)


def accept_paths(
    tokens: torch.Tensor, parents: torch.Tensor, target_tokens: torch.Tensor, seq_lens: torch.Tensor, max_len: int
) -> tuple[Acceptance, torch.Tensor]:
    """See :func:`sglang_dflash.ops.reference.accept_paths.accept_paths`."""
    bs, num_nodes = tokens.shape
    accepted = Acceptance.empty(bs, max_len, tokens.device)
    paths = torch.empty((bs, max_len), dtype=torch.int64, device=tokens.device)
    if bs:
        _accept_paths_kernel[(bs,)](
            tokens.contiguous(),
            parents.contiguous(),
            target_tokens.contiguous(),
            seq_lens,
            accepted.out_tokens,
            accepted.accept_lens,
            accepted.bonus_tokens,
            accepted.new_seq_lens,
            paths,
            NUM_NODES=num_nodes,
            MAX_LEN=max_len,
            WIDTH=max(_WARP, triton.next_power_of_2(max(num_nodes, max_len))),
            num_warps=1,
        )
    return accepted, paths
