"""Parts of scripts/fuzz.py.

Servers, prompts, grammars and hostile bodies come from tests/e2e.
"""

import os
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]
# As for pytest (`pythonpath` in pyproject.toml), and for the servers' processes (tests/conftest.py).
_FOLDERS = [str(REPO / folder) for folder in (".", "cpu", "scripts", "tests", "tests/e2e")]
sys.path[:0] = [folder for folder in _FOLDERS if folder not in sys.path]
os.environ["PYTHONPATH"] = os.pathsep.join([*_FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])
# Before anything imports torch.
for name, value in {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}.items():
    os.environ.setdefault(name, value)
