"""Cross entropy of rows under the target's lm_head, whose gradient is made along with it.

Autograd would keep the logits and their gradient in float32; to pass over those takes longer than the matrix product.

Legend of shapes: M rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def head_loss(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the rows' cross entropies.

    Args:
        hidden: [M, hidden]; what alone gets a gradient.
        head: [vocab, hidden], in the dtype of the matrix products.
        labels: [M] int64.
        weights: [M] float32.

    Returns:
        A scalar, float32.
    """
    return _HeadLoss.apply(hidden, head, labels, weights)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        logits = F.linear(hidden.to(head.dtype), head)
        # On a GPU two passes over the logits instead of ten; on a CPU there is no time to gain.
        passes = _compiled_loss_and_gradient if logits.is_cuda else loss_and_gradient
        losses, gradient = passes(logits, labels, weights)
        ctx.save_for_backward((gradient @ head).to(hidden.dtype))
        return losses.sum()

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_output.to(gradient.dtype), None, None, None


def loss_and_gradient(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """logits [M, vocab] -> weighted losses [M] float32, and their gradient [M, vocab] in the dtype of the logits."""
    log_chances = logits.float().log_softmax(-1)
    losses = -weights * log_chances.gather(1, labels[:, None])[:, 0]
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    gradient = weights[:, None] * (log_chances.exp() - is_label.float())
    return losses, gradient.to(logits.dtype)


_compiled_loss_and_gradient = torch.compile(loss_and_gradient, dynamic=False, fullgraph=True)
