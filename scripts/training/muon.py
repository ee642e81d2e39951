"""Muon: momentum whose matrices are orthogonalised before they are applied (kellerjordan.github.io/posts/muon).

`torch.optim.Muon` processes one matrix after another; for a small drafter that is more kernels than its backward has.
Here all matrices of one shape go through the iteration together.
"""

import math
from collections import defaultdict

import torch
from torch import Tensor

# Of the quintic iteration, from the same source. Singular values end between about 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
# With this, the elements of an update are as large as AdamW's (Liu et al. 2025, arXiv 2502.16982). So both optimizers
# can use the same learning rate.
UPDATE_RMS = 0.2


class Muon(torch.optim.Optimizer):
    """Muon for matrices, with Nesterov momentum and decoupled weight decay."""

    def __init__(self, params: list[Tensor], lr: float, weight_decay: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    raise ValueError(f"Muon takes matrices, not a parameter of shape {tuple(parameter.shape)}")
                # Created here, not in the first step, so that every checkpoint has it.
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters, each of which must have its gradient."""
        for group in self.param_groups:
            of_shape = defaultdict(list)
            for parameter in group["params"]:
                of_shape[parameter.shape].append(parameter)
            for shape, parameters in of_shape.items():
                gradients = [parameter.grad for parameter in parameters]
                momenta = [self.state[parameter]["momentum"] for parameter in parameters]
                torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
                updates = torch.stack(torch._foreach_lerp(gradients, momenta, group["momentum"]))
                scale = group["lr"] * UPDATE_RMS * math.sqrt(max(shape))
                updates = list(orthogonalize(updates).to(parameters[0].dtype).unbind())
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, updates, alpha=-scale)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return approximately the nearest (semi-)orthogonal matrices, by the Newton-Schulz iteration.

    Args:
        matrices: [matrices, rows, columns].

    Returns:
        [matrices, rows, columns], bf16 on a GPU.
    """
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
