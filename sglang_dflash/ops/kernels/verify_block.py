"""The gated delta rule over verified trees or chains. States are read once and not written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sglang_dflash.ops.kernels import pdl
from sglang_dflash.ops.kernels.delta_rule import MIN_SIZE, PRECISION, add_product, decays, gates, inverse_length, invert

# Rows of a state per program, as an H200 was fastest with 1, 8 and 32 requests taken together.
_ROWS = 64
# Numbers of a key at a time, and how many times that much is on its way.
_COLUMNS = 32
_STAGES = 3
_WARPS = 4


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
    ancestors,
    ancestors_stride,
    key_out,
    change_out,
    log_decay_out,
    key_out_stride,
    change_out_stride,
    log_decay_out_stride,
    output,
    width,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_SHORT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    request = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2)
    key_head = head // (HV // H)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < V
    token = tl.arange(0, W)
    is_token = token < width
    is_value = is_token[:, None] & is_row[None, :]
    slot = tl.load(slots + request).to(tl.int64)
    bits = tl.load(ancestors + request * ancestors_stride + token, mask=is_token, other=0)
    head_a_log = tl.load(a_log + head)
    head_dt_bias = tl.load(dt_bias + head)
    states += slot * state_stride + head * V * K + row[:, None] * K
    query += request * query_request_stride + token[:, None] * query_token_stride + key_head * K
    key += request * key_request_stride + token[:, None] * key_token_stride + key_head * K
    value += request * value_request_stride + token[:, None] * value_token_stride + head * V + row[None, :]
    key_out += request * key_out_stride + (token[:, None] * H + key_head) * K
    log_decay_out += request * log_decay_out_stride + token * HV + head
    of_token = (token[:, None] * HV + head) * V + row[None, :]
    change_out += request * change_out_stride + of_token
    output += request * width * HV * V + of_token
    if PDL:
        # Launched while the convolution still runs: only now is there what it computes.
        gdc_wait()

    block_value = tl.load(value, mask=is_value, other=0.0).to(tl.float32)
    block_a = tl.load(a + request * a_request_stride + token * a_token_stride + head, mask=is_token, other=0.0)
    block_b = tl.load(b + request * b_request_stride + token * b_token_stride + head, mask=is_token, other=0.0)
    # Of queries and keys as they are given: their lengths are divided by afterwards.
    key_precision: tl.constexpr = "tf32" if IS_SHORT else PRECISION
    key_squares, query_squares = tl.zeros([W], tl.float32), tl.zeros([W], tl.float32)
    of_keys, of_queries = tl.zeros([W, W], tl.float32), tl.zeros([W, W], tl.float32)
    found, read = tl.zeros([W, ROWS], tl.float32), tl.zeros([W, ROWS], tl.float32)
    for begin in tl.range(0, K, COLUMNS, num_stages=STAGES):
        column = begin + tl.arange(0, COLUMNS)[None, :]
        is_column = column < K
        state = tl.trans(tl.load(states + column, mask=is_row[:, None] & is_column, other=0.0))
        some_query = tl.load(query + column, mask=is_token[:, None] & is_column, other=0.0).to(tl.float32)
        given_key = tl.load(key + column, mask=is_token[:, None] & is_column, other=0.0)
        some_key = given_key.to(tl.float32)
        # Kept by one of those that share it.
        if (tl.program_id(0) == 0) & (head % (HV // H) == 0):
            tl.store(key_out + column, given_key, mask=is_token[:, None] & is_column)
        key_squares += tl.sum(some_key * some_key, axis=1)
        query_squares += tl.sum(some_query * some_query, axis=1)
        of_keys = tl.dot(some_key, tl.trans(some_key), acc=of_keys, input_precision=key_precision)
        of_queries = tl.dot(some_query, tl.trans(some_key), acc=of_queries, input_precision=key_precision)
        found = add_product(found, some_key, state, IS_SHORT, PRECISION)
        read = add_product(read, some_query, state, IS_SHORT, PRECISION)

    log_decay, beta = gates(head_a_log, block_a, head_dt_bias, block_b)
    # Padded rows see themselves only, and add nothing to the state.
    sees = (((bits[:, None] >> token[None, :]) & 1) != 0) | (token[:, None] == token[None, :])
    log_decay, beta = tl.where(is_token, log_decay, 0.0), tl.where(is_token, beta, 0.0)
    if tl.program_id(0) == 0:
        tl.store(log_decay_out, log_decay, mask=is_token)
    key_factor, query_factor = inverse_length(key_squares), inverse_length(query_squares) * scale
    decay, from_before = decays(log_decay, sees, W, PRECISION)
    lower = of_keys * decay * (beta * key_factor)[:, None] * key_factor[None, :]
    lower = tl.where(token[:, None] > token[None, :], lower, 0.0)
    change = (block_value - found * (from_before * key_factor)[:, None]) * beta[:, None]
    change = tl.dot(invert(lower, W, LEVELS, PRECISION), change, input_precision=PRECISION)
    weights = of_queries * decay * query_factor[:, None] * key_factor[None, :]
    read *= (from_before * query_factor)[:, None]
    read = tl.dot(weights, change, acc=read, input_precision=PRECISION)
    tl.store(change_out, change * key_factor[:, None], mask=is_value)
    tl.store(output, read.to(output.dtype.element_ty), mask=is_value)


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
    ancestors: torch.Tensor,
    key_out: torch.Tensor,
    change_out: torch.Tensor,
    log_decay_out: torch.Tensor,
) -> torch.Tensor:
    """See :func:`sglang_dflash.ops.reference.verify_block.verify_block`."""
    n, width, num_key_heads, key_size = key.shape
    num_value_heads, value_size = value.shape[2:]
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    # Else the kernel would write past their ends.
    assert n <= key_out.shape[0] and width <= key_out.shape[1]
    assert query.stride()[2:] == key.stride()[2:] == (key_size, 1) and value.stride()[2:] == (value_size, 1)
    assert a.stride(2) == b.stride(2) == 1 and ancestors.stride(1) == 1
    padded_width = max(MIN_SIZE, triton.next_power_of_2(width))
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
        ancestors,
        ancestors.stride(0),
        key_out,
        change_out,
        log_decay_out,
        key_out.stride(0),
        change_out.stride(0),
        log_decay_out.stride(0),
        output,
        width,
        key_size**-0.5,
        H=num_key_heads,
        HV=num_value_heads,
        K=key_size,
        V=value_size,
        W=padded_width,
        LEVELS=padded_width.bit_length() - 1,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        STAGES=_STAGES,
        IS_SHORT=key.itemsize == query.itemsize == 2,
        PRECISION=PRECISION,
        PDL=pdl.is_available(value.device),
        num_warps=_WARPS,
        launch_pdl=pdl.is_available(value.device),
    )
    return output
