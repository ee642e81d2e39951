"""Report stage: loss curves and the settings of the run."""

import torch

from training import processes
from training.files import plot_losses, read_json, write_json
from training.smollm2.settings import MAX_BYTES, Settings


def run(settings: Settings) -> None:
    """Write `losses.json`, `losses.png` and `summary.json` to the report folder.

    Raises:
        ValueError: the drafter is larger than MAX_BYTES.
    """
    if processes.rank() != 0:
        return
    losses = read_json(settings.work / "drafter_losses.json")
    num_bytes = sum(path.stat().st_size for path in settings.drafter_dir.iterdir())
    summary = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if settings.device == "cuda" else "cpu",
        "processes": processes.count(),
        "bytes": num_bytes,
        "held_out": losses["held_out"][-1],
        "training_seconds": losses["seconds"],
        "settings": {name: value for name, value in vars(settings).items() if isinstance(value, int | float | tuple)}
        | {"drafter": vars(settings.drafter)},
    }
    write_json(settings.report / "summary.json", summary)
    write_json(settings.report / "losses.json", losses)
    plot_losses(
        {"drafter": losses}, {"drafter": "Position-weighted loss of rows 1..15"}, settings.report / "losses.png"
    )
    if num_bytes > MAX_BYTES:
        raise ValueError(f"{settings.drafter_dir} has {num_bytes:,} bytes, more than MAX_BYTES = {MAX_BYTES:,}")
