"""Block drafting as it is trained and measured: many anchors' blocks in one forward of the drafter.

Legend of shapes: N sequences, T tokens each, A anchors per sequence, B block size, F features of a token.
"""

import torch
import torch.nn.functional as F
from support.oracle.drafter import Mask, ReferenceDrafter
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def initialize(drafter: ReferenceDrafter, std: float) -> None:
    """Normal weights, as HF Qwen3's; norms keep their ones."""
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)


def random_anchors(is_anchor: Tensor, count: int, block_size: int, generator: torch.Generator) -> Tensor:
    """Different positions out of those that are marked, and far enough from the end for a block with all its labels.

    Args:
        is_anchor: [N, T] bool; a sequence with fewer than `count` marks gives others too.

    Returns:
        [N, count] int64, in no order.
    """
    num_possible = is_anchor.shape[1] - block_size + 1
    draws = torch.rand(len(is_anchor), num_possible, generator=generator, device=is_anchor.device)
    return (draws + is_anchor[:, :num_possible]).topk(count, dim=1, sorted=False).indices


def draft_blocks(
    drafter: ReferenceDrafter, embedding: Tensor, features: Tensor, tokens: Tensor, anchors: Tensor
) -> Tensor:
    """Draft every anchor's block `[anchor token, mask x (B - 1)]`.

    Args:
        embedding: [vocab, hidden], the target's.
        features: [N, T, F], of the target.
        tokens: [N, T] int64.
        anchors: [N, A] int64 positions; a block sees the context before its anchor.

    Returns:
        [N, A, B - 1, hidden] for the target's lm_head, the rows after the anchor.
    """
    # Of the fused kernels only this one takes a mask; the maths kernel is for the CPU.
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return run_blocks(drafter, embedding, features, tokens, anchors, None)


def run_blocks(
    drafter: ReferenceDrafter,
    embedding: Tensor,
    features: Tensor,
    tokens: Tensor,
    anchors: Tensor,
    mask: Mask | None,
) -> Tensor:
    """:func:`draft_blocks` with a mask of one's own."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    block_positions = anchors[..., None] + torch.arange(drafter.config.block_size, device=tokens.device)
    block = torch.full_like(block_positions, drafter.config.mask_token_id)
    block[..., 0] = tokens.gather(1, anchors)
    with autocast(tokens.device):
        context_kv = drafter.project_context(features, positions)
        hidden = drafter(embedding[block].float(), block_positions, context_kv, positions, mask)
    return hidden[..., 1:, :]


def after_anchors(values: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """values [N, T] -> [N, A, B - 1], those at the positions of each block's rows after the anchor."""
    positions = anchors[..., None] + torch.arange(1, block_size, device=anchors.device)
    return values.gather(1, positions.flatten(1)).view_as(positions)


def row_weights(block_size: int, gamma: float, device: torch.device) -> Tensor:
    """Of rows k = 1..B-1, [B - 1] float32: exp(-(k - 1) / gamma), as an early miss voids the rest."""
    return torch.exp(-torch.arange(block_size - 1, device=device) / gamma)


def block_loss(logits: Tensor, labels: Tensor, counts: Tensor, gamma: float) -> Tensor:
    """Cross entropy, weighted by :func:`row_weights`.

    Args:
        logits: [N, A, B - 1, vocab].
        labels: [N, A, B - 1] int64.
        counts: [N, A, B - 1] bool, which of them there are.
    """
    losses = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    weights = counts * row_weights(labels.shape[-1] + 1, gamma, labels.device)
    return (losses * weights).sum() / weights.sum().clamp(min=1)


def accept_lengths(drafts: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Tokens that a cycle commits at each anchor, the bonus token included: all [N, A, B - 1] -> [N, A] int64."""
    return ((drafts == labels) & counts).cumprod(-1).sum(-1) + 1


def autocast(device: torch.device) -> torch.autocast:
    """bf16 on a GPU, float32 as it is on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
