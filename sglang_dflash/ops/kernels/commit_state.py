"""The recurrent states of the requests after their accepted paths. One launch for the states of all layers, and one for
the states of their convolutions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.kernels.delta_rule import MIN_SIZE, PRECISION, advance
from sglang_dflash.types import BlockInputs, States, StateSlots

# Rows of a state at a time, and columns per program. It was not faster with more rows on their way.
_ROWS = 32
_COLUMNS = 128
_WARPS = 4
_CHANNELS = 512


@triton.jit
def _plan(
    request,
    current,
    kept,
    turn,
    req_pool_indices,
    seq_lens,
    accept_lens,
    interval,
    is_due,
    NUM_KEPT: tl.constexpr,
):
    """Return what is written for a request.

    Returns:
        its slot, 0 for padding; the slot of the state that is kept, 0 for none; the number of accepted tokens; the
        number of them after which the state is kept.
    """
    req_pool_index = tl.load(req_pool_indices + request).to(tl.int64)
    slot = tl.where(tl.load(is_due) != 0, tl.load(current + req_pool_index).to(tl.int64), 0)
    seq_len = tl.load(seq_lens + request)
    accept_len = tl.load(accept_lens + request).to(tl.int32)
    boundary = (seq_len + accept_len) // interval
    kept_len = (boundary * interval - seq_len).to(tl.int32)
    kept_slot = slot * 0
    if NUM_KEPT > 0:
        place = (tl.load(turn + req_pool_index) + boundary) % NUM_KEPT
        kept_slot = tl.load(kept + req_pool_index * NUM_KEPT + place).to(tl.int64)
    kept_slot = tl.where(kept_len > 0, kept_slot, 0)
    return slot, kept_slot, accept_len, kept_len


@triton.jit
def _commit_temporal_kernel(
    states,
    state_layer_stride,
    state_stride,
    key,
    change,
    log_decay,
    key_layer_stride,
    key_stride,
    change_layer_stride,
    change_stride,
    log_decay_layer_stride,
    log_decay_stride,
    current,
    kept,
    turn,
    req_pool_indices,
    seq_lens,
    accept_lens,
    interval,
    is_due,
    paths,
    paths_stride,
    width,
    NUM_KEPT: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    K_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_SHORT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0) // K_TILES
    layer = tl.program_id(1).to(tl.int64)
    request = tl.program_id(2).to(tl.int64)
    token = tl.arange(0, W)
    node = tl.load(paths + request * paths_stride + token, mask=token < width, other=0)
    slot, kept_slot, accept_len, kept_len = _plan(
        request, current, kept, turn, req_pool_indices, seq_lens, accept_lens, interval, is_due, NUM_KEPT
    )
    if slot == 0:
        return
    is_token = token < accept_len
    column = tl.program_id(0) % K_TILES * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < K
    states += layer * state_layer_stride + head * V * K + column[None, :]
    key += layer * key_layer_stride + request * key_stride
    key += (node[:, None] * H + head // (HV // H)) * K + column[None, :]
    change += layer * change_layer_stride + request * change_stride + (node[:, None] * HV + head) * V
    log_decay += layer * log_decay_layer_stride + request * log_decay_stride + node * HV + head
    path_key = tl.load(key, mask=is_token[:, None] & is_column[None, :], other=0.0).to(tl.float32)
    path_log_decay = tl.load(log_decay, mask=is_token, other=0.0)
    for begin in tl.range(0, V, ROWS, num_stages=1):
        row = begin + tl.arange(0, ROWS)
        is_row = row < V
        is_state = is_row[:, None] & is_column[None, :]
        tile = states + row[:, None] * K
        state = tl.load(tile + slot * state_stride, mask=is_state, other=0.0)
        path_change = tl.load(change + row[None, :], mask=is_token[:, None] & is_row[None, :], other=0.0)
        if kept_slot > 0:
            at_boundary = advance(state, path_key, path_change, path_log_decay, kept_len, W, IS_SHORT, PRECISION)
            tl.store(tile + kept_slot * state_stride, at_boundary, mask=is_state)
        last = advance(state, path_key, path_change, path_log_decay, accept_len, W, IS_SHORT, PRECISION)
        tl.store(tile + slot * state_stride, last, mask=is_state)


@triton.jit
def _last_inputs(inputs, node_stride, paths, states, num_tokens, place, is_place, is_channel, PLACES: tl.constexpr):
    """Load the state of a convolution after `num_tokens` tokens of a path: the inputs of the last of them, and before
    these the last places of the state before the path."""
    source = num_tokens - PLACES + place
    node = tl.load(paths + source, mask=is_place & (source >= 0), other=0)
    is_on_path = (is_place & (source >= 0))[:, None] & is_channel[None, :]
    is_before = (is_place & (source < 0))[:, None] & is_channel[None, :]
    on_path = tl.load(inputs + node[:, None] * node_stride, mask=is_on_path)
    before = tl.load(states + (PLACES + source)[:, None], mask=is_before)
    return tl.where(is_on_path, on_path, before)


@triton.jit
def _commit_conv_kernel(
    states,
    state_layer_stride,
    state_stride,
    inputs,
    input_layer_stride,
    input_stride,
    input_node_stride,
    current,
    kept,
    turn,
    req_pool_indices,
    seq_lens,
    accept_lens,
    interval,
    is_due,
    paths,
    paths_stride,
    num_channels,
    NUM_KEPT: tl.constexpr,
    PLACES: tl.constexpr,
    PADDED_PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    layer = tl.program_id(1).to(tl.int64)
    request = tl.program_id(2).to(tl.int64)
    slot, kept_slot, accept_len, kept_len = _plan(
        request, current, kept, turn, req_pool_indices, seq_lens, accept_lens, interval, is_due, NUM_KEPT
    )
    if slot == 0:
        return
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < num_channels
    place = tl.arange(0, PADDED_PLACES)
    is_place = place < PLACES
    states += layer * state_layer_stride + channel[None, :] * PLACES
    inputs += layer * input_layer_stride + request * input_stride + channel[None, :]
    paths += request * paths_stride
    before = states + slot * state_stride
    last = _last_inputs(inputs, input_node_stride, paths, before, accept_len, place, is_place, is_channel, PLACES)
    is_state = is_place[:, None] & is_channel[None, :]
    if kept_slot > 0:
        at_boundary = _last_inputs(
            inputs, input_node_stride, paths, before, kept_len, place, is_place, is_channel, PLACES
        )
        tl.store(states + kept_slot * state_stride + place[:, None], at_boundary, mask=is_state)
    # The state is written in place: until all threads have read it.
    tl.debug_barrier()
    tl.store(before + place[:, None], last, mask=is_state)


def commit_state(
    states: States,
    inputs: BlockInputs,
    slots: StateSlots,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    accept_lens: torch.Tensor,
    interval: int,
    is_due: torch.Tensor,
    paths: torch.Tensor,
) -> None:
    """See :func:`sglang_dflash.ops.reference.commit_state.commit_state`."""
    bs = seq_lens.shape[0]
    if bs == 0:
        return
    num_layers, _, num_value_heads, value_size, key_size = states.temporal.shape
    num_key_heads = inputs.key.shape[3]
    num_channels, places = states.conv.shape[2:]
    assert paths.stride(1) == inputs.conv.stride(3) == 1
    # Not read where no state is kept.
    kept = slots.current if slots.kept is None else slots.kept
    plan = (
        slots.current,
        kept,
        slots.turn,
        req_pool_indices,
        seq_lens,
        accept_lens,
        interval,
        is_due,
        paths,
        paths.stride(0),
    )
    num_kept = 0 if slots.kept is None else slots.kept.shape[1]
    key_tiles = triton.cdiv(key_size, _COLUMNS)
    _commit_temporal_kernel[(num_value_heads * key_tiles, num_layers, bs)](
        states.temporal,
        *states.temporal.stride()[:2],
        inputs.key,
        inputs.change,
        inputs.log_decay,
        *inputs.key.stride()[:2],
        *inputs.change.stride()[:2],
        *inputs.log_decay.stride()[:2],
        *plan,
        paths.shape[1],
        NUM_KEPT=num_kept,
        H=num_key_heads,
        HV=num_value_heads,
        K=key_size,
        V=value_size,
        W=max(MIN_SIZE, triton.next_power_of_2(paths.shape[1])),
        K_TILES=key_tiles,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        IS_SHORT=inputs.key.itemsize == 2,
        PRECISION=PRECISION,
        num_warps=_WARPS,
    )
    _commit_conv_kernel[(triton.cdiv(num_channels, _CHANNELS), num_layers, bs)](
        states.conv,
        *states.conv.stride()[:2],
        inputs.conv,
        *inputs.conv.stride()[:3],
        *plan,
        num_channels,
        NUM_KEPT=num_kept,
        PLACES=places,
        PADDED_PLACES=triton.next_power_of_2(places),
        CHANNELS=_CHANNELS,
        num_warps=4,
    )
