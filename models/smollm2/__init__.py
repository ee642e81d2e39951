"""A DFlash drafter for SmolLM2-135M-Instruct, trained on what that target writes.

Made by `scripts/train_pair.py --pair smollm2`. The target does not come with it: `make_target.py` writes it.
"""

import json
from pathlib import Path

PAIR_DIR = Path(__file__).parent
DRAFTER_DIR = PAIR_DIR / "drafter"


def load_prompts() -> dict[str, list[str]]:
    """Users' first words by kind ("chat", "code", "maths"), which the drafter was not trained on."""
    return json.loads((PAIR_DIR / "prompts.json").read_text(encoding="utf-8"))
