"""The causal convolution of Gated DeltaNet layers along paths of verified trees or chains, all nodes in parallel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_dflash.ops.kernels import pdl

# Nodes and channels per program.
_NODES = 8
_CHANNELS = 128
_WARPS = 4


@triton.jit
def _convolve_nodes_kernel(
    inputs,
    inputs_request_stride,
    inputs_node_stride,
    states,
    state_stride,
    slots,
    parents,
    parents_stride,
    weight,
    bias,
    inputs_out,
    inputs_out_request_stride,
    inputs_out_node_stride,
    output,
    num_nodes,
    num_channels,
    PLACES: tl.constexpr,
    NODES: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    request = tl.program_id(2).to(tl.int64)
    node = (tl.program_id(1) * NODES + tl.arange(0, NODES)).to(tl.int64)
    is_node = node < num_nodes
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < num_channels
    slot = tl.load(slots + request).to(tl.int64)
    parents += request * parents_stride
    inputs += request * inputs_request_stride + channel[None, :]
    states += slot * state_stride + channel[None, :] * PLACES
    weight += channel * (PLACES + 1)
    if HAS_BIAS:
        row_bias = tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
        total = tl.zeros([NODES, CHANNELS], tl.float32) + row_bias[None, :]
    else:
        total = tl.zeros([NODES, CHANNELS], tl.float32)
    if PDL:
        # Launched while the projection still runs: its result is complete from here on.
        gdc_wait()
        gdc_launch_dependents()
    # Oldest input first. A place of the state is a negative number: -1 is right before the root.
    for tap in tl.static_range(PLACES + 1):
        source = node
        for _ in tl.static_range(PLACES - tap):
            parent = tl.load(parents + source, mask=is_node & (source >= 0), other=0)
            source = tl.where(source >= 0, parent, source - 1)
        is_in_tree = (is_node & (source >= 0))[:, None] & is_channel[None, :]
        row = inputs + source[:, None] * inputs_node_stride
        taken = tl.load(row, mask=is_in_tree, other=0.0)
        if tap < PLACES:
            is_before = (is_node & (source < 0))[:, None] & is_channel[None, :]
            before = tl.load(states + (PLACES + source)[:, None], mask=is_before, other=0.0)
            taken = tl.where(is_in_tree, taken, before)
        row_weight = tl.load(weight + tap, mask=is_channel, other=0.0).to(tl.float32)
        # The product of two numbers of 16 bits is exact in float32, so it is rounded once.
        total += (taken.to(tl.float32) * row_weight[None, :]).to(taken.dtype).to(tl.float32)
    is_output = is_node[:, None] & is_channel[None, :]
    inputs_out += request * inputs_out_request_stride + node[:, None] * inputs_out_node_stride + channel[None, :]
    tl.store(inputs_out, taken, mask=is_output)
    output += (request * num_nodes + node[:, None]) * num_channels + channel[None, :]
    tl.store(output, (total / (1.0 + tl.exp(-total))).to(output.dtype.element_ty), mask=is_output)


def convolve_nodes(
    inputs: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    parents: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    inputs_out: torch.Tensor,
) -> torch.Tensor:
    """See :func:`sglang_dflash.ops.reference.convolve_nodes.convolve_nodes`."""
    n, num_nodes, num_channels = inputs.shape
    output = torch.empty((n, num_nodes, num_channels), dtype=inputs.dtype, device=inputs.device)
    if n == 0:
        return output
    # Else the kernel would write past its end.
    assert n <= inputs_out.shape[0] and num_nodes <= inputs_out.shape[1]
    assert inputs.stride(2) == inputs_out.stride(2) == parents.stride(1) == 1
    assert states.stride()[1:] == (states.shape[2], 1) and weight.is_contiguous()
    assert inputs.dtype == states.dtype == weight.dtype == inputs_out.dtype
    nodes = min(_NODES, triton.next_power_of_2(num_nodes))
    _convolve_nodes_kernel[(triton.cdiv(num_channels, _CHANNELS), triton.cdiv(num_nodes, nodes), n)](
        inputs,
        *inputs.stride()[:2],
        states,
        states.stride(0),
        slots,
        parents,
        parents.stride(0),
        weight,
        bias,
        inputs_out,
        *inputs_out.stride()[:2],
        output,
        num_nodes,
        num_channels,
        PLACES=states.shape[2],
        NODES=nodes,
        CHANNELS=_CHANNELS,
        HAS_BIAS=bias is not None,
        PDL=pdl.is_available(inputs.device),
        num_warps=_WARPS,
        launch_pdl=pdl.is_available(inputs.device),
    )
    return output
