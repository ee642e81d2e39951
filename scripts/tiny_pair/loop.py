"""The training loop of both models: resumable, bounded in time, losses kept for the report."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from tiny_pair.settings import TrainSettings, write_json


def train(
    name: str,
    model: nn.Module,
    loss_at: Callable[[int], Tensor],
    evaluate: Callable[[], dict[str, float]],
    settings: TrainSettings,
    work: Path,
) -> None:
    """Train `model` in place and write `work/<name>_losses.json`.

    Args:
        loss_at: step -> scalar loss of that step's batch; the batch depends on the step alone.
        evaluate: held-out metrics by name; called with the model in eval mode.
    """
    optimizer = make_optimizer(model, settings)
    checkpoint = work / f"{name}_checkpoint.pt"
    step, elapsed, history = 0, 0.0, {"train": [], "held_out": []}
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, elapsed, history = state["step"], state["elapsed"], json.loads(state["history"])

    started = time.monotonic() - elapsed
    recent: list[Tensor] = []
    progress_bar = tqdm(total=settings.steps, initial=step, desc=name, mininterval=5)
    while step < settings.steps and elapsed < settings.max_seconds:
        progress = max(step / settings.steps, elapsed / settings.max_seconds)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate(step, progress)
        loss = loss_at(step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(loss.detach())
        step += 1
        elapsed = time.monotonic() - started
        progress_bar.update()

        # One transfer for many steps: reading every loss would stall the GPU.
        if step % 20 == 0:
            history["train"].append([step, float(torch.stack(recent).mean())])
            recent.clear()
        if step % settings.eval_every == 0:
            history["held_out"].append([step, evaluate_in_eval_mode(model, evaluate)])
            progress_bar.set_postfix(history["held_out"][-1][1])
        if step % settings.checkpoint_every == 0:
            save_state(checkpoint, model, optimizer, step, elapsed, history)
    progress_bar.close()

    if step % settings.eval_every != 0:
        history["held_out"].append([step, evaluate_in_eval_mode(model, evaluate)])
    history["seconds"] = round(elapsed, 1)
    write_json(work / f"{name}_losses.json", history)
    print(f"{name}: {step} steps in {elapsed:.0f} s, held out {history['held_out'][-1][1]}")


def make_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norm weights alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.peak_lr, betas=(0.9, 0.95), fused=True)


def evaluate_in_eval_mode(model: nn.Module, evaluate: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Run `evaluate` without gradients and round what it gives."""
    model.eval()
    with torch.no_grad():
        metrics = {key: round(value, 4) for key, value in evaluate().items()}
    model.train()
    return metrics


def save_state(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, elapsed: float, history: dict
) -> None:
    """Write a checkpoint in one rename, so that a run that is cut off leaves the last whole one."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "elapsed": elapsed,
        "history": json.dumps(history),
    }
    torch.save(state, path.with_suffix(".partial"))
    path.with_suffix(".partial").replace(path)
