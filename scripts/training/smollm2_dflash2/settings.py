"""Settings of a DFlash2 drafter for SmolLM2-135M-Instruct, and of its control."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from models.smollm2 import DRAFTER_DIR, PAIR_DIR
from training.loop import TrainSettings
from training.smollm2 import settings as smollm2

# Published drafters have these taps, groups and candidates, and a rank of 256 for eight times the hidden size.
PARTS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 64, "selector_top_k": 16}


def with_parts(config: dict) -> dict:
    """Return a drafter's `config.json` with convolutions and a selector."""
    return config | {
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": config["dflash_config"] | PARTS,
        "is_causal": False,
    }


@dataclass
class DFlash2Settings(smollm2.Settings):
    """Settings of the SmolLM2 pair's stages. Two drafters are trained, three minutes each on one H100."""

    drafter_config: dict = field(default_factory=lambda: with_parts(smollm2.DRAFTER_CONFIG))
    control_config: dict = field(default_factory=lambda: smollm2.DRAFTER_CONFIG)
    control_init: Path = DRAFTER_DIR
    generation_seconds: float = 75.0
    drafter: TrainSettings = field(
        default_factory=lambda: TrainSettings(40_000, 180.0, 1.5e-3, 200, 0.05, 1000, muon=True)
    )

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> "DFlash2Settings":
        settings = super().from_arguments(args)
        settings.control_init = args.control_init
        return settings

    @property
    def control_dir(self) -> Path:
        return self.out / "control"

    @property
    def drafters(self) -> dict[str, Path]:
        return {"drafter": self.drafter_dir, "control": self.control_dir}

    @property
    def prompts_dir(self) -> Path:
        return PAIR_DIR
