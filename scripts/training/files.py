"""Output of all stages: checkpoints, JSON, loss curves."""

import json
from pathlib import Path

import matplotlib
import torch
from safetensors.torch import save_file
from torch import Tensor

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def save_checkpoint(folder: Path, config: dict, weights: dict[str, Tensor]) -> None:
    """Write `config.json` and `model.safetensors` in bfloat16. A file is either complete or absent."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in weights.items()}
    partial = folder / "model.partial"
    save_file(rounded, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(folder / "model.safetensors")
    write_json(folder / "config.json", config)


def write_json(path: Path, value: object) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict:
    """Return the content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def plot_losses(losses: dict[str, dict], titles: dict[str, str], path: Path) -> None:
    """Plot training and held-out losses of each training, and the acceptance length of the last, a drafter.

    Args:
        losses: by training, the losses that `loop.train` wrote.
        titles: by training.
        path: of the picture.
    """
    figure, axes = plt.subplots(
        1, len(losses), figsize=(6.5 * len(losses), 4.5), constrained_layout=True, squeeze=False
    )
    for axis, (name, history) in zip(axes[0], losses.items(), strict=True):
        axis.plot(*zip(*history["train"], strict=True), linewidth=0.8, label="training")
        steps = [step for step, _ in history["held_out"]]
        axis.plot(steps, [metrics["loss"] for _, metrics in history["held_out"]], marker=".", label="held out")
        axis.set(title=titles[name], xlabel="step", ylabel="cross entropy (nats)")
        axis.grid(alpha=0.3)
        axis.legend(loc="upper right")
    accept_axis = axes[0, -1].twinx()
    accept_lengths = [metrics["accept_length"] for _, metrics in history["held_out"]]
    accept_axis.plot(steps, accept_lengths, color="tab:green", marker=".", label="acceptance length")
    accept_axis.set_ylabel("acceptance length on held-out continuations")
    accept_axis.legend(loc="center right")
    figure.savefig(path, dpi=130)
    plt.close(figure)
