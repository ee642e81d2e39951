"""Cross entropy under the target's lm_head, whose gradient is computed in the forward.

Autograd would keep the logits and their gradient in float32. Passes over those take longer than the matrix product.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash import ops


def head_loss(
    hidden: Tensor,
    target_hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor,
    soft_share: float,
    num_candidates: int,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of cross entropies, to the labels and to the target's distribution, and the best tokens.

    Args:
        hidden: [T, H]. The only input with a gradient.
        target_hidden: [T, H]. The target's, for the same tokens.
        head: [V, H], in the dtype of the matrix products.
        labels: [T] int64.
        weights: [T] float32.
        soft_share: weight of the target's distribution; the labels have the rest.
        num_candidates: K, at most 16; 0: no best tokens are wanted.

    Returns:
        loss: a scalar, float32.
        candidates: [T, K] int64. Tokens with the largest logits, the most probable first.
    """
    return _HeadLoss.apply(hidden, target_hidden, head, labels, weights, soft_share, num_candidates)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        target_hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        weights: Tensor,
        soft_share: float,
        num_candidates: int,
    ) -> tuple[Tensor, Tensor]:
        logits, target_logits = F.linear(hidden.to(head.dtype), head), F.linear(target_hidden.to(head.dtype), head)
        # Compiled, there is a third of the passes over the logits. A CPU gains nothing by it.
        passes = _compiled_loss_and_gradient if logits.is_cuda else loss_and_gradient
        losses, gradient = passes(logits, target_logits, labels, weights, soft_share)
        ctx.save_for_backward((gradient @ head).to(hidden.dtype))
        candidates = labels.new_empty((len(labels), 0))
        if num_candidates:
            candidates = ops.top_columns(logits, num_candidates)[1]
        ctx.mark_non_differentiable(candidates)
        return losses.sum(), candidates

    @staticmethod
    def backward(ctx, grad_output: Tensor, _of_candidates: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_output.to(gradient.dtype), None, None, None, None, None, None


def loss_and_gradient(
    logits: Tensor, target_logits: Tensor, labels: Tensor, weights: Tensor, soft_share: float
) -> tuple[Tensor, Tensor]:
    """Return weighted losses [T] float32, and their gradient [T, V] in the logits' dtype, for logits [T, V] of both."""
    log_chances = logits.float().log_softmax(-1)
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    wanted = soft_share * target_logits.float().softmax(-1) + (1 - soft_share) * is_label.float()
    losses = -weights * (wanted * log_chances).sum(-1)
    gradient = weights[:, None] * (log_chances.exp() - wanted)
    return losses, gradient.to(logits.dtype)


_compiled_loss_and_gradient = torch.compile(loss_and_gradient, dynamic=False, fullgraph=True)
