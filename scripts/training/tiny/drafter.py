"""Drafter stage: block drafting, learned from the frozen target's features and its own continuations."""

import torch
import torch.nn.functional as F
from support.oracle.decode import context_features
from support.oracle.drafter import ReferenceDrafter
from torch import Tensor

from training.blocks import (
    accept_lengths,
    after_anchors,
    autocast,
    block_loss,
    draft_blocks,
    follow_chains,
    initialize,
    pair_loss,
    random_anchors,
)
from training.files import save_checkpoint
from training.loop import step_generator, train
from training.tiny.settings import DRAFTER_STAGE, Settings
from training.tiny.target import load_served_target, load_tokens, random_windows

# Generated sequences that are held out to evaluate the drafter, and the step number that draws their anchors.
NUM_VALIDATION = 256
VALIDATION_STEP = 999_999


def run(settings: Settings) -> None:
    """Train the drafter in float32 with bf16 autocast and write it, rounded to bf16, to `out/drafter`."""
    torch.manual_seed(settings.seed)
    target = load_served_target(settings)
    drafter = ReferenceDrafter(settings.drafter_config)
    initialize(drafter, settings.drafter_config["initializer_range"])
    drafter.to(settings.device)
    block_size = drafter.config.block_size
    corpus = load_tokens(settings, "train_tokens.pt")
    generated = torch.load(settings.work / "generated.pt", weights_only=True)
    tokens = generated["tokens"].to(settings.device)
    prompt_lengths = generated["prompt_lengths"].to(settings.device)
    # Generation sorts its batches by prompt length, so the held-out sequences are spread over all of them.
    num_held_aside = min(NUM_VALIDATION, len(tokens) // 4)
    is_validation = torch.zeros(len(tokens), dtype=torch.bool, device=settings.device)
    is_validation[torch.linspace(0, len(tokens) - 1, num_held_aside, device=settings.device).long()] = True
    train_rows = (~is_validation).nonzero().flatten()

    def draft(
        batch: Tensor, first: Tensor, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draft `count` anchors in each sequence of `batch` [bs, T], from positions `first` [bs] on.

        Returns hidden states, logits, the tokens before the labels, and the labels, each [bs, count, W - 1, ...].
        """
        is_anchor = torch.arange(batch.shape[1], device=settings.device) >= first[:, None]
        anchors = random_anchors(is_anchor, count, block_size, generator)
        with torch.no_grad():
            states = target.model(input_ids=batch, use_cache=False, output_hidden_states=True).hidden_states
            features = context_features(states, drafter)
        hidden = draft_blocks(drafter, target.get_input_embeddings().weight, features, batch, anchors)
        with autocast(hidden.device):
            logits = F.linear(hidden, target.get_output_embeddings().weight)
        labels = after_anchors(batch, anchors, block_size)
        before = torch.cat([batch.gather(1, anchors)[..., None], labels[..., :-1]], dim=-1)
        return hidden, logits, before, labels

    def loss_at(step: int) -> Tensor:
        generator = step_generator(settings.seed, DRAFTER_STAGE, step, settings.device)
        if step % settings.corpus_every == 0:
            batch = random_windows(corpus, settings.corpus_batch, settings.sequence_length, generator)
            first = torch.ones(len(batch), dtype=torch.long, device=settings.device)
            drafted = draft(batch, first, settings.corpus_anchors, generator)
        else:
            shape = (settings.drafter_batch,)
            rows = train_rows[torch.randint(len(train_rows), shape, generator=generator, device=settings.device)]
            drafted = draft(tokens[rows].long(), prompt_lengths[rows], settings.anchors, generator)
        return loss_of(*drafted)

    def loss_of(hidden: Tensor, logits: Tensor, before: Tensor, labels: Tensor) -> Tensor:
        loss = block_loss(logits, labels, torch.ones_like(labels, dtype=torch.bool), settings.loss_gamma)
        if drafter.pairs is not None:
            loss = loss + pair_loss(drafter, hidden, logits, before, labels, settings.loss_gamma)
        return loss

    def evaluate() -> dict[str, float]:
        generator = step_generator(settings.seed, DRAFTER_STAGE, VALIDATION_STEP, settings.device)
        hidden, logits, before, labels = draft(
            tokens[is_validation].long(), prompt_lengths[is_validation], settings.anchors, generator
        )
        counts = torch.ones_like(labels, dtype=torch.bool)
        drafts = follow_chains(drafter, hidden, logits, before[..., 0])
        lengths = accept_lengths(drafts, labels, counts)
        return {"loss": float(loss_of(hidden, logits, before, labels)), "accept_length": float(lengths.float().mean())}

    def save() -> None:
        save_checkpoint(settings.drafter_dir, settings.drafter_config, drafter.state_dict())

    train("drafter", drafter, loss_at, evaluate, save, settings.drafter, settings.work)
