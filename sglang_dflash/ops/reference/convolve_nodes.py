"""The causal convolution of Gated DeltaNet layers along paths of verified trees or chains, in torch."""

from __future__ import annotations

import torch
from torch.nn.functional import silu


def convolve_nodes(
    inputs: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    parents: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    inputs_out: torch.Tensor,
) -> torch.Tensor:
    """Convolve each node with its S nearest ancestors, then apply SiLU.

    Where a path is shorter than the convolution, the last inputs before the root are in the state. Each product is
    rounded to the dtype of the inputs; products are added in float32, oldest input first, as SGLang's decoding does
    (`kernels.ops.mamba.causal_conv1d_triton.causal_conv1d_update`).

    Args:
        inputs: [n, N, C], N nodes of each of n requests; channels are contiguous in memory.
        states: [slots, C, S], the last inputs before the root, oldest first. Not written.
        slots: [n] int32, of the requests.
        parents: [n, N] int64, as in :class:`sglang_dflash.types.Trees`. Requests with the same rows may share memory
            (stride 0).
        weight: [C, S + 1], oldest input first.
        bias: [C] or None.
        inputs_out: [>= n, >= N, C], the dtype of inputs. A copy of them is written to it.

    Returns:
        [n, N, C], the dtype of inputs, contiguous.
    """
    n, num_nodes, channels = inputs.shape
    inputs_out[:n, :num_nodes] = inputs
    num_places = states.shape[2]
    # Row S + x is node x; for x < 0 it is place S + x of the state.
    rows = torch.cat([states[slots.long()].transpose(1, 2).to(inputs.dtype), inputs], dim=1)
    node = torch.arange(num_nodes, device=inputs.device).expand(n, -1)
    path = [node]
    for _ in range(num_places):
        node = torch.where(node >= 0, parents.gather(1, node.clamp(min=0)), node - 1)
        path.append(node)
    total = torch.zeros((), device=inputs.device) if bias is None else bias.float()
    for tap, node in enumerate(reversed(path)):
        taken = rows.gather(1, (num_places + node)[..., None].expand(-1, -1, channels))
        total = total + (taken * weight[:, tap]).float()
    return silu(total).to(inputs.dtype)
