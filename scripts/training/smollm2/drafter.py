"""Drafter stage: block drafting learned from the frozen target's features and its own answers."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.oracle.drafter import ReferenceDrafter
from training import processes
from training.blocks import (
    accept_lengths,
    after_anchors,
    autocast,
    block_loss,
    draft_blocks,
    initialize,
    random_anchors,
)
from training.files import save_checkpoint
from training.loop import step_generator, train
from training.smollm2.llama import Llama
from training.smollm2.settings import DRAFTER_CONFIG, DRAFTER_STAGE, Settings

# The step number that draws the anchors of the measurement.
VALIDATION_STEP = 999_999


@dataclass
class Batch:
    """Rows of conversations: tokens [N, T] int64, is_answer [N, T] bool, temperatures [N] of the answers."""

    tokens: Tensor
    is_answer: Tensor
    temperatures: Tensor


def run(settings: Settings) -> None:
    """Train the drafter in float32 with bf16 autocast and write it, rounded to bf16, to `out/drafter`."""
    torch.manual_seed(settings.seed)
    llama = Llama(settings.target_dir, settings.device)
    generated = torch.load(settings.work / f"generated_{processes.rank()}.pt", weights_only=True)
    rows = Batch(**{name: tensor.to(settings.device) for name, tensor in generated.items()})
    num_train = num_train_rows(len(rows.tokens), settings)
    layer_ids = DRAFTER_CONFIG["dflash_config"]["target_layer_ids"]
    # Some features are a hundred times as large as others. The optimizer, whose steps are equally long in all weights,
    # gets them normalised; what is saved reads them as they are.
    feature_scale = feature_sizes(llama.features(rows.tokens[: settings.drafter_batch].long(), layer_ids))
    drafter = new_drafter(feature_scale, settings)
    block_size = drafter.config.block_size

    def take(indices: Tensor) -> Batch:
        return Batch(rows.tokens[indices].long(), rows.is_answer[indices], rows.temperatures[indices])

    def draft(batch: Batch, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [N, count, B - 1, vocab], labels, and which of these there are, at random anchors."""
        anchors = random_anchors(batch.is_answer, count, block_size, generator)
        features = llama.features(batch.tokens, layer_ids) / feature_scale
        hidden = draft_blocks(drafter, llama.embedding, features, batch.tokens, anchors)
        with autocast(hidden.device):
            logits = F.linear(hidden, llama.embedding)
        # What follows an answer is not the target's to say.
        counts = after_anchors(batch.is_answer, anchors, block_size).cumprod(-1).bool()
        return logits, after_anchors(batch.tokens, anchors, block_size), counts

    def loss_at(step: int) -> Tensor:
        generator = step_generator(settings.seed, DRAFTER_STAGE, step, settings.device)
        is_long = step % settings.long_every == settings.long_every - 1
        num_rows = settings.long_batch * settings.long_parts if is_long else settings.drafter_batch
        batch = take(torch.randint(num_train, (num_rows,), generator=generator, device=settings.device))
        if is_long:
            batch = Batch(
                batch.tokens.view(settings.long_batch, -1), batch.is_answer.view(settings.long_batch, -1), None
            )
        count = settings.long_anchors if is_long else settings.anchors
        return block_loss(*draft(batch, count, generator), settings.loss_gamma)

    def evaluate() -> dict[str, float]:
        generator = step_generator(settings.seed, DRAFTER_STAGE, VALIDATION_STEP, settings.device)
        held_out = torch.arange(num_train, len(rows.tokens), device=settings.device)[: settings.validation_rows]
        sums = torch.zeros(2, device=settings.device)
        by_temperature = torch.zeros(len(settings.answer_temperatures), 2, device=settings.device)
        for indices in held_out.split(settings.drafter_batch):
            batch = take(indices)
            logits, labels, counts = draft(batch, settings.anchors, generator)
            sums += torch.stack([block_loss(logits, labels, counts, settings.loss_gamma), sums.new_ones(())])
            lengths = accept_lengths(logits.argmax(-1), labels, counts).float().mean(-1)
            for i, (temperature, _) in enumerate(settings.answer_temperatures):
                chosen = lengths[batch.temperatures == temperature]
                by_temperature[i] += torch.stack([chosen.sum(), chosen.new_tensor(len(chosen))])
        sums, by_temperature = processes.average(sums), processes.average(by_temperature)
        total = by_temperature.sum(0)
        metrics = {"loss": float(sums[0] / sums[1]), "accept_length": float(total[0] / total[1])}
        for (temperature, _), (length, number) in zip(settings.answer_temperatures, by_temperature, strict=True):
            metrics[f"accept_length_t{temperature:g}"] = float(length / number.clamp(min=1e-9))
        return metrics

    def save() -> None:
        weights = drafter.state_dict()
        weights["fc.weight"] = weights["fc.weight"] / feature_scale
        save_checkpoint(settings.drafter_dir, DRAFTER_CONFIG, weights)

    train("drafter", drafter, loss_at, evaluate, save, settings.drafter, settings.work)


def feature_sizes(features: Tensor) -> Tensor:
    """The root mean square of each feature, the same for all processes: [N, T, F] -> [F], in their dtype."""
    # The first token's are of another order than all others'.
    squares = processes.average(features[:, 1:].float().square().mean((0, 1)))
    return squares.sqrt().to(features.dtype)


def new_drafter(feature_scale: Tensor, settings: Settings) -> ReferenceDrafter:
    """The one that is gone on from, or one of random weights; float32.

    Args:
        feature_scale: [F], what features are divided by before `fc` reads them.
    """
    if settings.init is not None:
        drafter = ReferenceDrafter.from_pretrained(settings.init).train().to(settings.device)
        drafter.fc.weight.data *= feature_scale
        return drafter
    drafter = ReferenceDrafter(DRAFTER_CONFIG)
    initialize(drafter, DRAFTER_CONFIG["initializer_range"])
    return drafter.to(settings.device)


def num_train_rows(num_rows: int, settings: Settings) -> int:
    """Rows of one process that are trained on, the first."""
    return num_rows - max(1, round(settings.held_out_share * num_rows))
