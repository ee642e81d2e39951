"""The tiny pair: a Qwen3 target and its DFlash drafter, 4 M parameters, on the standard library."""

import argparse

from training.tiny import corpus, drafter, report, target
from training.tiny.settings import Settings

STAGES = {
    "corpus": corpus.run,
    "prompts": corpus.run_prompts,
    "target": target.run_training,
    "generate": target.run_generation,
    "drafter": drafter.run,
    "eval": report.run_evaluation,
    "report": report.run_report,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this pair has."""
    parser.add_argument("--target-steps", type=int)
    parser.add_argument("--target-seconds", type=float, help="upper bound of the target's training time")


make_settings = Settings.from_arguments
