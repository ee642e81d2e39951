"""A trained DFlash2 drafter for the tiny pair's target: convolutions and a selector, 0.5 M parameters.

Made by `scripts/train_pair.py --pair tiny_dflash2`.
"""

from pathlib import Path

DRAFTER_DIR = Path(__file__).parent / "drafter"
