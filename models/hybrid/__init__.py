"""A real target with Gated DeltaNet layers, and a drafter: 2.8 M parameters, trained on the Python standard library.

Made by `scripts/train_pair.py --pair hybrid`. `target/` loads like any HF checkpoint, `drafter/` like a z-lab one.
Prompts for them are those of `models.tiny`.
"""

from pathlib import Path

PAIR_DIR = Path(__file__).parent
TARGET_DIR = PAIR_DIR / "target"
DRAFTER_DIR = PAIR_DIR / "drafter"
