"""Block drafting for training and evaluation: the blocks of many anchors in one forward of the drafter.

Letters in shapes: bs sequences, T tokens each, A anchors per sequence, W block width, V vocabulary, H hidden size,
F features of a token.
"""

import torch
import torch.nn.functional as F
from support.oracle.drafter import Mask, ReferenceDrafter
from support.oracle.parts import BlockConv, CandidateSelector
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def initialize(drafter: ReferenceDrafter, std: float) -> None:
    """Draw normal weights, as HF's Qwen3 does. Norms keep their ones.

    Convolutions begin as the identity. Pairs begin without a score: only the vectors of first tokens are not zero.
    """
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
    for module in drafter.modules():
        if isinstance(module, BlockConv):
            nn.init.zeros_(module.kernel_projection.weight)
        elif isinstance(module, CandidateSelector):
            nn.init.normal_(module.predecessor_codebook)


def random_anchors(is_anchor: Tensor, count: int, block_size: int, generator: torch.Generator) -> Tensor:
    """Draw different positions among the marked ones, each with room for a block and all its labels.

    Args:
        is_anchor: [bs, T] bool. A sequence with fewer than `count` marks also gives unmarked positions.
        count: positions per sequence.
        block_size: W.
        generator: of the random numbers.

    Returns:
        [bs, count] int64, in no order.
    """
    num_possible = is_anchor.shape[1] - block_size + 1
    draws = torch.rand(len(is_anchor), num_possible, generator=generator, device=is_anchor.device)
    return (draws + is_anchor[:, :num_possible]).topk(count, dim=1, sorted=False).indices


def draft_blocks(
    drafter: ReferenceDrafter, embedding: Tensor, features: Tensor, tokens: Tensor, anchors: Tensor
) -> Tensor:
    """Draft the block `[anchor token, mask x (W - 1)]` of every anchor.

    Args:
        drafter: the drafter.
        embedding: [V, H]. The target's.
        features: [bs, T, F]. Of the target.
        tokens: [bs, T] int64.
        anchors: [bs, A] int64. Positions; a block sees the context before its anchor.

    Returns:
        [bs, A, W - 1, H] for the target's lm_head. Hidden states of the positions after the anchor.
    """
    # The only fused kernel that takes a mask, and the math kernel for the CPU.
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
    """Draft blocks as :func:`draft_blocks` does, with another mask."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    block_positions = anchors[..., None] + torch.arange(drafter.config.block_size, device=tokens.device)
    block = torch.full_like(block_positions, drafter.config.mask_token_id)
    block[..., 0] = tokens.gather(1, anchors)
    with autocast(tokens.device):
        context_kv = drafter.project_context(features, positions)
        hidden = drafter(embedding[block].float(), block_positions, context_kv, positions, mask)
    return hidden[..., 1:, :]


def after_anchors(values: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """Return the values at the positions after each anchor: [bs, T] -> [bs, A, W - 1]."""
    positions = anchors[..., None] + torch.arange(1, block_size, device=anchors.device)
    return values.gather(1, positions.flatten(1)).view_as(positions)


def row_weights(block_size: int, gamma: float, device: torch.device) -> Tensor:
    """Return weights [W - 1] float32, exp(-i / gamma) for draft i: an early miss voids the later drafts."""
    return torch.exp(-torch.arange(block_size - 1, device=device) / gamma)


def block_loss(logits: Tensor, labels: Tensor, counts: Tensor, gamma: float) -> Tensor:
    """Return the cross entropy, weighted by :func:`row_weights`.

    Args:
        logits: [bs, A, W - 1, V].
        labels: [bs, A, W - 1] int64.
        counts: [bs, A, W - 1] bool. Which labels count.
        gamma: of the weights.
    """
    losses = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    weights = counts * row_weights(labels.shape[-1] + 1, gamma, labels.device)
    return (losses * weights).sum() / weights.sum().clamp(min=1)


def pair_loss(
    drafter: ReferenceDrafter, hidden: Tensor, logits: Tensor, before: Tensor, labels: Tensor, gamma: float
) -> Tensor:
    """Return the cross entropy of the labels among the candidates of their positions, weighted as in block_loss.

    A label that is no candidate takes the place of the last one.

    Args:
        drafter: scores pairs.
        hidden: [bs, A, W - 1, H].
        logits: [bs, A, W - 1, V].
        before: [bs, A, W - 1] int64. The text's tokens before the labels.
        labels: [bs, A, W - 1] int64.
        gamma: of the weights.
    """
    candidates = logits.topk(drafter.pairs.num_candidates).indices
    is_label = candidates == labels[..., None]
    last = torch.where(is_label.any(-1), candidates[..., -1], labels)
    candidates = torch.cat([candidates[..., :-1], last[..., None]], dim=-1)
    scores = logits.gather(-1, candidates).float() + drafter.pairs(before, hidden.float(), candidates)
    places = (candidates == labels[..., None]).int().argmax(-1)
    losses = F.cross_entropy(scores.flatten(0, -2), places.flatten(), reduction="none").view(labels.shape)
    weights = row_weights(labels.shape[-1] + 1, gamma, labels.device).expand_as(losses)
    return (losses * weights).sum() / weights.sum()


@torch.no_grad()
def follow_chains(drafter: ReferenceDrafter, hidden: Tensor, logits: Tensor, anchor_tokens: Tensor) -> Tensor:
    """Return the drafts of every block, each the best after the draft before it: [bs, A, W - 1] int64.

    Args:
        drafter: scores pairs, or not.
        hidden: [bs, A, W - 1, H].
        logits: [bs, A, W - 1, V].
        anchor_tokens: [bs, A] int64.
    """
    if drafter.pairs is None:
        return logits.argmax(-1)
    values, candidates = logits.float().topk(drafter.pairs.num_candidates)
    drafts = [anchor_tokens]
    for depth in range(logits.shape[-2]):
        tokens = candidates[..., depth, :]
        scores = values[..., depth, :] + drafter.pairs(drafts[-1], hidden[..., depth, :].float(), tokens)
        drafts.append(tokens.gather(-1, scores.argmax(-1, keepdim=True))[..., 0])
    return torch.stack(drafts[1:], dim=-1)


def accept_lengths(drafts: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Return the tokens that a cycle commits at each anchor, with the bonus token: [bs, A, W - 1] -> [bs, A] int64."""
    return ((drafts == labels) & counts).cumprod(-1).sum(-1) + 1


def autocast(device: torch.device) -> torch.autocast:
    """Return a context for bf16 on a GPU; on a CPU it changes nothing."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
