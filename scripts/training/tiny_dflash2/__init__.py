"""A DFlash2 drafter for the tiny pair's target: convolutions and a selector, 0.5 M parameters.

It is trained by the stages of the tiny pair, for the target that is shipped.
"""

import argparse

from training.tiny import corpus, drafter, report, target
from training.tiny_dflash2.settings import DFlash2Settings

STAGES = {
    "corpus": corpus.run_for_target,
    "generate": target.run_generation,
    "drafter": drafter.run,
    "eval": report.run_evaluation,
}

make_settings = DFlash2Settings.from_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options. The target is not trained."""
    parser.set_defaults(target_steps=None, target_seconds=None)
