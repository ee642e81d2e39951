"""Drafter stage: block drafting learned from the frozen target's features and its own continuations.

Legend of shapes: N sequences, T tokens each, A anchors per sequence, B block size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from sglang_dflash.oracle.decode import context_features
from sglang_dflash.oracle.drafter import ReferenceDrafter
from tiny_pair.loop import train
from tiny_pair.settings import DRAFTER_CONFIG, Settings, save_checkpoint, step_generator
from tiny_pair.target import load_served_target, load_tokens, random_windows

# The generated sequences held aside to measure the drafter, and the step number that draws their anchors.
NUM_VALIDATION = 256
VALIDATION_STEP = 999_999


def run(settings: Settings) -> None:
    """Train the drafter in float32 with bf16 autocast and write it, rounded to bf16, to `out/drafter`."""
    torch.manual_seed(settings.seed)
    target = load_served_target(settings)
    drafter = ReferenceDrafter(DRAFTER_CONFIG).to(settings.device)
    initialize(drafter)
    corpus = load_tokens(settings, "train_tokens.pt")
    generated = torch.load(settings.work / "generated.pt", weights_only=True)
    tokens = generated["tokens"].to(settings.device)
    prompt_lengths = generated["prompt_lengths"].to(settings.device)
    # The batches of generation come one prompt length after the other: hold sequences of every length aside.
    num_held_aside = min(NUM_VALIDATION, len(tokens) // 4)
    is_validation = torch.zeros(len(tokens), dtype=torch.bool, device=settings.device)
    is_validation[torch.linspace(0, len(tokens) - 1, num_held_aside, device=settings.device).long()] = True
    train_rows = (~is_validation).nonzero().flatten()

    def loss_at(step: int) -> Tensor:
        generator = step_generator(settings.seed, "drafter", step, settings.device)
        if step % settings.corpus_every == 0:
            batch = random_windows(corpus, settings.corpus_batch, settings.sequence_length, generator)
            first = torch.ones(len(batch), dtype=torch.long, device=settings.device)
            anchors = random_anchors(first, batch.shape[1], settings.corpus_anchors, generator)
        else:
            shape = (settings.drafter_batch,)
            rows = train_rows[torch.randint(len(train_rows), shape, generator=generator, device=settings.device)]
            batch = tokens[rows].long()
            anchors = random_anchors(prompt_lengths[rows], batch.shape[1], settings.anchors, generator)
        return weighted_loss(*block_logits(target, drafter, batch, anchors, settings.device), settings.loss_gamma)

    def evaluate() -> dict[str, float]:
        generator = step_generator(settings.seed, "drafter", VALIDATION_STEP, settings.device)
        batch = tokens[is_validation].long()
        anchors = random_anchors(prompt_lengths[is_validation], batch.shape[1], settings.anchors, generator)
        logits, labels = block_logits(target, drafter, batch, anchors, settings.device)
        num_correct = (logits.argmax(-1) == labels).cumprod(-1).sum(-1).float()
        loss = weighted_loss(logits, labels, settings.loss_gamma)
        return {"loss": float(loss), "accept_length": float(num_correct.mean()) + 1}

    train("drafter", drafter, loss_at, evaluate, settings.drafter, settings.work)
    save_checkpoint(settings.drafter_dir, DRAFTER_CONFIG, drafter.state_dict())


def initialize(drafter: ReferenceDrafter) -> None:
    """Normal weights of std `initializer_range`, as HF Qwen3; norms keep their ones."""
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=DRAFTER_CONFIG["initializer_range"])


def random_anchors(first: Tensor, length: int, count: int, generator: torch.Generator) -> Tensor:
    """Anchors in [first, length - B], so that a block always has all its labels.

    Args:
        first: [N] int64, the first position allowed in each sequence.

    Returns:
        [N, count] int64; an anchor can come twice.
    """
    span = length - DRAFTER_CONFIG["block_size"] + 1 - first
    uniform = torch.rand(len(first), count, generator=generator, device=first.device)
    return first[:, None] + (uniform * span[:, None]).long()


def block_logits(
    target: PreTrainedModel, drafter: ReferenceDrafter, tokens: Tensor, anchors: Tensor, device: str
) -> tuple[Tensor, Tensor]:
    """Draft every anchor's block `[anchor token, mask x (B - 1)]` in one forward.

    Args:
        tokens: [N, T] int64.
        anchors: [N, A] int64 positions; a block sees the context before its anchor.

    Returns:
        logits: [N, A, B - 1, vocab] float32, for the rows after the anchor.
        labels: [N, A, B - 1] int64, the tokens at those positions.
    """
    block_size = drafter.config.block_size
    with torch.no_grad():
        hidden_states = target.model(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states
        features = context_features(hidden_states, drafter)
    positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    block_positions = anchors[..., None] + torch.arange(block_size, device=device)
    true_tokens = tokens.gather(1, block_positions.flatten(1)).view_as(block_positions)
    block = torch.full_like(true_tokens, drafter.config.mask_token_id)
    block[..., 0] = true_tokens[..., 0]
    block_embeds = target.get_input_embeddings()(block).float()

    # Of the fused kernels only this one takes a mask; the maths kernel is for the CPU.
    kernels = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"), sdpa_kernel(kernels):
        context_kv = drafter.project_context(features, positions)
        hidden = drafter(block_embeds, block_positions, context_kv, positions)
        logits = F.linear(hidden[..., 1:, :], target.get_output_embeddings().weight)
    return logits.float(), true_tokens[..., 1:]


def weighted_loss(logits: Tensor, labels: Tensor, gamma: float) -> Tensor:
    """Cross entropy, row k = 1..B-1 weighted by exp(-(k - 1) / gamma): an early miss voids the rest."""
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    weights = torch.exp(-torch.arange(labels.shape[-1], device=labels.device) / gamma)
    return (losses.mean((0, 1)) * weights).sum() / weights.sum()
