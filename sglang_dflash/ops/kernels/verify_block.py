"""A verified block through the gated delta rule: states are read once, and stay as they are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sglang_dflash.ops.kernels import pdl
from sglang_dflash.ops.kernels.delta_rule import KEYS, gates, key_columns, normalize, read, update

# Rows of a state per warp: so few that the warps of a single request fill a GPU, and that all hold theirs in registers.
_ROWS = 8


@triton.jit
def _verify_block_kernel(
    query,
    key,
    value,
    a,
    b,
    query_request_stride,
    query_token_stride,
    key_request_stride,
    key_token_stride,
    value_request_stride,
    value_token_stride,
    a_request_stride,
    a_token_stride,
    b_request_stride,
    b_token_stride,
    a_log,
    dt_bias,
    states,
    state_stride,
    slots,
    key_out,
    value_out,
    log_decay_out,
    beta_out,
    key_out_stride,
    value_out_stride,
    gate_out_stride,
    output,
    width,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    K_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    request = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2)
    key_head = head // (HV // H)
    is_first_of_key_head = head % (HV // H) == 0
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < V
    column = key_columns(K_TILES)
    is_column = column < K
    of_state = head * V * K + row[None, :, None] * K + column[:, None, :]
    slot = tl.load(slots + request).to(tl.int64)
    state = tl.load(
        states + slot * state_stride + of_state, mask=is_row[None, :, None] & is_column[:, None, :], other=0.0
    )
    head_a_log = tl.load(a_log + head)
    head_dt_bias = tl.load(dt_bias + head)
    if PDL:
        # Launched while the convolution still runs, which begins when everything before it has ended: only what it
        # computes is not there before this.
        gdc_wait()

    query += request * query_request_stride + key_head * K + column
    key += request * key_request_stride + key_head * K + column
    value += request * value_request_stride + head * V + row
    a += request * a_request_stride + head
    b += request * b_request_stride + head
    key_out += request * key_out_stride + key_head * K + column
    value_out += request * value_out_stride + head * V + row
    log_decay_out += request * gate_out_stride + head
    beta_out += request * gate_out_stride + head
    output += request * width * HV * V + head * V + row

    # Of the next token: it is on its way while this one is computed with.
    next_query = tl.load(query, mask=is_column, other=0.0)
    next_key = tl.load(key, mask=is_column, other=0.0)
    next_value = tl.load(value, mask=is_row, other=0.0)
    next_a = tl.load(a)
    next_b = tl.load(b)
    for step in range(width):
        token_query, token_key, token_value, token_a, token_b = next_query, next_key, next_value, next_a, next_b
        has_next = step + 1 < width
        query += query_token_stride
        key += key_token_stride
        value += value_token_stride
        a += a_token_stride
        b += b_token_stride
        next_query = tl.load(query, mask=is_column & has_next, other=0.0)
        next_key = tl.load(key, mask=is_column & has_next, other=0.0)
        next_value = tl.load(value, mask=is_row & has_next, other=0.0)
        next_a = tl.load(a, mask=has_next, other=0.0)
        next_b = tl.load(b, mask=has_next, other=0.0)

        log_decay, beta = gates(head_a_log, token_a, head_dt_bias, token_b)
        tl.store(value_out, token_value, mask=is_row)
        if tl.program_id(0) == 0:
            tl.store(key_out, token_key, mask=is_column & is_first_of_key_head)
            tl.store(log_decay_out, log_decay)
            tl.store(beta_out, beta)
        state = update(state, normalize(token_key), token_value, log_decay, beta)
        tl.store(output, read(state, normalize(token_query), scale).to(output.dtype.element_ty), mask=is_row)
        key_out += H * K
        value_out += HV * V
        log_decay_out += HV
        beta_out += HV
        output += HV * V


def verify_block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    key_out: torch.Tensor,
    value_out: torch.Tensor,
    log_decay_out: torch.Tensor,
    beta_out: torch.Tensor,
) -> torch.Tensor:
    """See :func:`sglang_dflash.ops.reference.verify_block.verify_block`."""
    n, width, num_key_heads, key_size = key.shape
    num_value_heads, value_size = value.shape[2:]
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    # Else a kernel would write behind them.
    assert n <= key_out.shape[0] and width <= key_out.shape[1]
    assert query.stride()[2:] == key.stride()[2:] == (key_size, 1) and value.stride()[2:] == (value_size, 1)
    assert a.stride(2) == b.stride(2) == 1
    _verify_block_kernel[(triton.cdiv(value_size, _ROWS), n, num_value_heads)](
        query,
        key,
        value,
        a,
        b,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *a.stride()[:2],
        *b.stride()[:2],
        a_log,
        dt_bias,
        states,
        states.stride(0),
        slots,
        key_out,
        value_out,
        log_decay_out,
        beta_out,
        key_out.stride(0),
        value_out.stride(0),
        log_decay_out.stride(0),
        output,
        width,
        key_size**-0.5,
        H=num_key_heads,
        HV=num_value_heads,
        K=key_size,
        V=value_size,
        K_TILES=triton.next_power_of_2(triton.cdiv(key_size, KEYS.value)),
        ROWS=_ROWS,
        PDL=pdl.is_available(value.device),
        num_warps=1,
        launch_pdl=pdl.is_available(value.device),
    )
    return output
