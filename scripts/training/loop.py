"""Training loop of all models: it resumes, has a time limit, and keeps losses for the report."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from training import processes
from training.files import write_json
from training.muon import Muon

# Reading a loss waits for the GPU, so losses and the clock are read once in this many steps.
STEPS_PER_READING = 20


@dataclass
class TrainSettings:
    """Settings of one training: AdamW, or Muon for matrices; warm-up, then a cosine to `min_lr_ratio`.

    `max_seconds` limits the wall time. On a slow machine the schedule then follows the clock instead of the steps, so
    that the learning rate still ends low. On a fast machine the steps alone decide, and a run is reproducible.
    """

    steps: int
    max_seconds: float
    peak_lr: float
    warmup_steps: int
    weight_decay: float
    eval_every: int
    muon: bool = False
    checkpoint_seconds: float = 60.0
    min_lr_ratio: float = 0.02
    max_grad_norm: float = 1.0

    def learning_rate(self, step: int, progress: float) -> float:
        """Return the learning rate at `step`; `progress` in [0, 1] is the share of the training that is done."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        decayed = self.min_lr_ratio + (1 - self.min_lr_ratio) * cosine
        return self.peak_lr * min(1.0, (step + 1) / self.warmup_steps) * decayed


def step_generator(seed: int, stage: int, step: int, device: str) -> torch.Generator:
    """Return a generator that depends on seed, stage, step and process only, so that a resumed run is reproducible."""
    number = (seed * 8 + stage) * 1_000_000 + step
    return torch.Generator(device).manual_seed(number * 64 + processes.rank())


def train(
    name: str,
    model: nn.Module,
    loss_at: Callable[[int], Tensor],
    evaluate: Callable[[], dict[str, float]],
    save: Callable[[], None],
    settings: TrainSettings,
    work: Path,
) -> None:
    """Train `model` in place and write `work/<name>_losses.json`. Several processes average their gradients.

    Args:
        name: of the training, for its files.
        model: to train.
        loss_at: returns the scalar loss of a step's batch. The batch depends only on the step and the process.
        evaluate: returns held-out metrics by name. Every process calls it, with the model in eval mode.
        save: writes the model. The first process calls it with every checkpoint and at the end.
        settings: of the training.
        work: folder for checkpoints and losses.
    """
    optimizers = make_optimizers(model, settings)
    checkpoint = work / f"{name}_checkpoint.pt"
    step, elapsed, history = 0, 0.0, {"train": [], "held_out": []}
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, optimizer_state in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)
        step, elapsed, history = state["step"], state["elapsed"], json.loads(state["history"])

    is_first = processes.rank() == 0
    started, saved_at = time.monotonic() - elapsed, elapsed
    recent: list[Tensor] = []
    progress_bar = tqdm(total=settings.steps, initial=step, desc=name, mininterval=5, disable=not is_first)
    while step < settings.steps and elapsed < settings.max_seconds:
        progress = max(step / settings.steps, elapsed / settings.max_seconds)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = settings.learning_rate(step, progress)
        loss = loss_at(step)
        loss.backward()
        processes.average_gradients(model.parameters())
        nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        recent.append(loss.detach())
        step += 1
        progress_bar.update()

        if step % STEPS_PER_READING == 0:
            history["train"].append([step, round(float(torch.stack(recent).mean()), 4)])
            recent.clear()
            elapsed = processes.first_says(time.monotonic() - started)
            if is_first and elapsed - saved_at >= settings.checkpoint_seconds:
                saved_at = elapsed
                save_state(checkpoint, model, optimizers, step, elapsed, history)
                write_json(work / f"{name}_losses.json", history)
                save()
        if step % settings.eval_every == 0:
            history["held_out"].append([step, evaluate_in_eval_mode(model, evaluate)])
            progress_bar.set_postfix(history["held_out"][-1][1])
    progress_bar.close()

    if step % settings.eval_every != 0 or not history["held_out"]:
        history["held_out"].append([step, evaluate_in_eval_mode(model, evaluate)])
    history["seconds"] = round(time.monotonic() - started, 1)
    if is_first:
        save_state(checkpoint, model, optimizers, step, elapsed, history)
        write_json(work / f"{name}_losses.json", history)
        save()
        print(f"{name}: {step} steps in {history['seconds']:.0f} s, held out {history['held_out'][-1][1]}", flush=True)


def make_optimizers(model: nn.Module, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """Return optimizers with weight decay for matrices, and without it for weights of norms and of convolutions.

    Convolutions have three dimensions. They begin as the identity, which a decay would take away.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices, others = [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]
    groups = [{"params": others, "weight_decay": 0.0}]
    optimizers = []
    if settings.muon:
        optimizers.append(Muon(matrices, settings.peak_lr, settings.weight_decay))
    else:
        groups.insert(0, {"params": matrices, "weight_decay": settings.weight_decay})
    return [*optimizers, torch.optim.AdamW(groups, lr=settings.peak_lr, betas=(0.9, 0.95), fused=True)]


def evaluate_in_eval_mode(model: nn.Module, evaluate: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Run `evaluate` without gradients and round its metrics."""
    model.eval()
    with torch.no_grad():
        metrics = {key: round(value, 4) for key, value in evaluate().items()}
    model.train()
    return metrics


def save_state(
    path: Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    elapsed: float,
    history: dict,
) -> None:
    """Write a checkpoint and rename it, so that an interrupted run leaves the last complete one."""
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "step": step,
        "elapsed": elapsed,
        "history": json.dumps(history),
    }
    torch.save(state, path.with_suffix(".partial"))
    path.with_suffix(".partial").replace(path)
