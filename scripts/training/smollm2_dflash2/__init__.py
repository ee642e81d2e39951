"""A DFlash2 drafter for SmolLM2-135M-Instruct, and its control: the same drafter without convolutions and a selector.

Both continue from the drafter that is shipped, on the same texts, with the same limits. Convolutions that are the
identity and pairs without a score draft as that drafter does.
"""

import argparse
from pathlib import Path

from models.smollm2 import DRAFTER_DIR
from training import smollm2
from training.smollm2 import conversations, drafter, evaluation
from training.smollm2_dflash2.settings import DFlash2Settings


def train_control(settings: DFlash2Settings) -> None:
    """Train the control and write it to `out/control`."""
    drafter.train_drafter("control", settings.control_config, settings.control_init, settings.control_dir, settings)


STAGES = {
    "target": conversations.make,
    "generate": conversations.run,
    "drafter": drafter.run,
    "control": train_control,
    "eval": evaluation.run,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the SmolLM2 pair, and one for the control."""
    smollm2.add_arguments(parser)
    parser.set_defaults(init=DRAFTER_DIR)
    parser.add_argument("--control-init", type=Path, default=DRAFTER_DIR, help="continue the control from this drafter")


make_settings = DFlash2Settings.from_arguments
