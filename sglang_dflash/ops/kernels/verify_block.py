"""The gated delta rule over verified trees or chains. States are read once and not written."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_dflash.ops.kernels import pdl
from sglang_dflash.ops.kernels.delta_rule import MIN_SIZE, PRECISION, add_product, decays, gates, inverse_length, invert

# Numbers of a row of a state that are multiplied at a time: fewer if there are more than 16 nodes.
_COLUMNS = 64
_WARPS = 4


class _Tiles(NamedTuple):
    """Sizes that were fastest on an H100.

    Attributes:
        rows: of a state, per program.
        compare_columns: numbers of a key that are multiplied at a time while the nodes of a head are compared.
        compare_warps: warps that compare them.
    """

    rows: int
    compare_columns: int
    compare_warps: int


# For up to 16 nodes, and for more of them.
_FEW, _MANY = _Tiles(128, 64, 2), _Tiles(64, 32, 1)


@triton.jit
def _compare_nodes_kernel(
    query,
    key,
    a,
    b,
    query_request_stride,
    query_token_stride,
    key_request_stride,
    key_token_stride,
    a_request_stride,
    a_token_stride,
    b_request_stride,
    b_token_stride,
    a_log,
    dt_bias,
    ancestors,
    ancestors_stride,
    key_out,
    log_decay_out,
    key_out_stride,
    log_decay_out_stride,
    matrices,
    factors,
    width,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    LEVELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_SHORT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    key_head = head // (HV // H)
    token = tl.arange(0, W)
    is_token = token < width
    bits = tl.load(ancestors + request * ancestors_stride + token, mask=is_token, other=0)
    head_a_log = tl.load(a_log + head)
    head_dt_bias = tl.load(dt_bias + head)
    query += request * query_request_stride + token[:, None] * query_token_stride + key_head * K
    key += request * key_request_stride + token[:, None] * key_token_stride + key_head * K
    key_out += request * key_out_stride + (token[:, None] * H + key_head) * K
    if PDL:
        # Launched while the convolution still runs: only now is there what it computes.
        gdc_wait()
        gdc_launch_dependents()
    block_a = tl.load(a + request * a_request_stride + token * a_token_stride + head, mask=is_token, other=0.0)
    block_b = tl.load(b + request * b_request_stride + token * b_token_stride + head, mask=is_token, other=0.0)
    # Of queries and keys as they are given: their lengths are divided by afterwards.
    key_precision: tl.constexpr = "tf32" if IS_SHORT else PRECISION
    key_squares, query_squares = tl.zeros([W], tl.float32), tl.zeros([W], tl.float32)
    of_keys, of_queries = tl.zeros([W, W], tl.float32), tl.zeros([W, W], tl.float32)
    for begin in tl.static_range(0, K, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)[None, :]
        is_part = is_token[:, None] & (column < K)
        some_query = tl.load(query + column, mask=is_part, other=0.0).to(tl.float32)
        given_key = tl.load(key + column, mask=is_part, other=0.0)
        some_key = given_key.to(tl.float32)
        # Kept by one of the heads that share it.
        if head % (HV // H) == 0:
            tl.store(key_out + column, given_key, mask=is_part)
        key_squares += tl.sum(some_key * some_key, axis=1)
        query_squares += tl.sum(some_query * some_query, axis=1)
        of_keys = tl.dot(some_key, tl.trans(some_key), acc=of_keys, input_precision=key_precision)
        of_queries = tl.dot(some_query, tl.trans(some_key), acc=of_queries, input_precision=key_precision)

    log_decay, beta = gates(head_a_log, block_a, head_dt_bias, block_b)
    # Padded rows see themselves only, and add nothing to the state.
    sees = (((bits[:, None] >> token[None, :]) & 1) != 0) | (token[:, None] == token[None, :])
    log_decay, beta = tl.where(is_token, log_decay, 0.0), tl.where(is_token, beta, 0.0)
    log_decay_out += request * log_decay_out_stride + token * HV + head
    tl.store(log_decay_out, log_decay, mask=is_token)
    key_factor, query_factor = inverse_length(key_squares), inverse_length(query_squares) * scale
    decay, from_before = decays(log_decay, sees, W, PRECISION)
    lower = of_keys * decay * (beta * key_factor)[:, None] * key_factor[None, :]
    lower = tl.where(token[:, None] > token[None, :], lower, 0.0)
    solved = invert(lower, W, LEVELS, PRECISION) * beta[None, :]
    weights = of_queries * decay * query_factor[:, None] * key_factor[None, :]
    of_head = request * HV + head
    matrices += of_head * 2 * W * W + token[:, None] * W + token[None, :]
    tl.store(matrices, solved)
    tl.store(matrices + W * W, weights)
    factors += of_head * 3 * W + token
    tl.store(factors, from_before * key_factor)
    tl.store(factors + W, from_before * query_factor)
    tl.store(factors + 2 * W, key_factor)


@triton.jit
def _verify_block_kernel(
    query,
    key,
    value,
    query_request_stride,
    query_token_stride,
    key_request_stride,
    key_token_stride,
    value_request_stride,
    value_token_stride,
    states,
    state_stride,
    slots,
    change_out,
    change_out_stride,
    output,
    matrices,
    factors,
    width,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_SHORT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    key_head = head // (HV // H)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < V
    # A node is a column.
    token = tl.arange(0, W)
    is_token = token < width
    is_value = is_row[:, None] & is_token[None, :]
    slot = tl.load(slots + request).to(tl.int64)
    states += slot * state_stride + head * V * K + row[:, None] * K
    # The states are read while the kernels before this one still run. They do not write them.
    tiles = ()
    for begin in tl.static_range(0, K, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)[None, :]
        tiles += (tl.load(states + column, mask=is_row[:, None] & (column < K), other=0.0),)
    # Keys and queries of the nodes in turns.
    both = tl.arange(0, 2 * W)
    query += request * query_request_stride + (both // 2) * query_token_stride + key_head * K
    key += request * key_request_stride + (both // 2) * key_token_stride + key_head * K
    pairs = tl.where(both % 2 == 0, key, query)
    value += request * value_request_stride + token[None, :] * value_token_stride + head * V + row[:, None]
    of_head = request * HV + head
    # Transposed.
    matrices += of_head * 2 * W * W + token[None, :] * W + token[:, None]
    factors += of_head * 3 * W + token
    of_node = (token[None, :] * HV + head) * V + row[:, None]
    change_out += request * change_out_stride + of_node
    output += request * width * HV * V + of_node

    # The kernel before lets this one start once all its programs have waited for the convolution. So queries and keys
    # are there, and only what that kernel writes is waited for below.
    products = tl.zeros([ROWS, 2 * W], tl.float32)
    for i in tl.static_range(len(tiles)):
        column = i * COLUMNS + tl.arange(0, COLUMNS)[:, None]
        is_part = (both // 2 < width)[None, :] & (column < K)
        pair = tl.load(pairs[None, :] + column, mask=is_part, other=0.0).to(tl.float32)
        products = add_product(products, tiles[i], pair, IS_SHORT, PRECISION)
    found, read = tl.split(tl.reshape(products, [ROWS, W, 2]))
    if PDL:
        gdc_wait()
    of_key, of_query, key_factor = tl.load(factors), tl.load(factors + W), tl.load(factors + 2 * W)
    given = tl.load(value, mask=is_value, other=0.0).to(tl.float32)
    change = tl.dot(given - found * of_key[None, :], tl.load(matrices), input_precision=PRECISION)
    read = tl.dot(change, tl.load(matrices + W * W), acc=read * of_query[None, :], input_precision=PRECISION)
    tl.store(change_out, change * key_factor[None, :], mask=is_value)
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
    """See :func:`sglang_dflash.ops.reference.verify_block.verify_block`.

    A first launch compares the nodes with each other: what a node adds depends on what its ancestors add. A second one
    reads the states.
    """
    n, width, num_key_heads, key_size = key.shape
    num_value_heads, value_size = value.shape[2:]
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    # Else the kernel would write past their ends.
    assert n <= key_out.shape[0] and width <= key_out.shape[1]
    assert query.stride()[2:] == key.stride()[2:] == (key_size, 1) and value.stride()[2:] == (value_size, 1)
    assert a.stride(2) == b.stride(2) == 1 and ancestors.stride(1) == 1
    padded_width = max(MIN_SIZE, triton.next_power_of_2(width))
    tiles = _FEW if padded_width == MIN_SIZE else _MANY
    # For each head: the matrices that turn values without what is found for their keys into changes, and changes into
    # what the queries read of them; and three factors of each node.
    matrices = torch.empty((n, num_value_heads, 2, padded_width, padded_width), device=value.device)
    factors = torch.empty((n, num_value_heads, 3, padded_width), device=value.device)
    has_pdl = pdl.is_available(value.device)
    shared = {
        "H": num_key_heads,
        "HV": num_value_heads,
        "K": key_size,
        "W": padded_width,
        "IS_SHORT": key.itemsize == query.itemsize == 2,
        "PRECISION": PRECISION,
        "PDL": has_pdl,
        "launch_pdl": has_pdl,
    }
    _compare_nodes_kernel[(num_value_heads, n)](
        query,
        key,
        a,
        b,
        *query.stride()[:2],
        *key.stride()[:2],
        *a.stride()[:2],
        *b.stride()[:2],
        a_log,
        dt_bias,
        ancestors,
        ancestors.stride(0),
        key_out,
        log_decay_out,
        key_out.stride(0),
        log_decay_out.stride(0),
        matrices,
        factors,
        width,
        key_size**-0.5,
        LEVELS=padded_width.bit_length() - 1,
        COLUMNS=tiles.compare_columns,
        num_warps=tiles.compare_warps,
        **shared,
    )
    _verify_block_kernel[(triton.cdiv(value_size, tiles.rows), num_value_heads, n)](
        query,
        key,
        value,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        states,
        states.stride(0),
        slots,
        change_out,
        change_out.stride(0),
        output,
        matrices,
        factors,
        width,
        V=value_size,
        ROWS=tiles.rows,
        COLUMNS=max(32, _COLUMNS * MIN_SIZE // padded_width),
        num_warps=_WARPS,
        **shared,
    )
    return output
