"""A real target and drafter of 4 M parameters together, trained on the Python standard library.

Made by `scripts/train_pair.py --pair tiny`. `target/` loads like any HF checkpoint, `drafter/` like a z-lab one.
"""

import json
from pathlib import Path

PAIR_DIR = Path(__file__).parent
TARGET_DIR = PAIR_DIR / "target"
DRAFTER_DIR = PAIR_DIR / "drafter"


def load_prompts(pair_dir: Path = PAIR_DIR) -> list[str]:
    """About 60 pieces of Python, 20-200 tokens each, from modules that neither model was trained on."""
    return json.loads((pair_dir / "prompts.json").read_text(encoding="utf-8"))
