"""Test plugin: a CPU verifies trees by default, as a GPU does.

`support.plugins` installs it.
"""

from __future__ import annotations

import os

OBSTACLE = os.environ.get("DEFAULT_TREES_OBSTACLE")


def register() -> None:
    from sglang_dflash.engine import stages
    from sglang_dflash.server_args import trees

    trees.TREE_DEVICES = ("cuda", "cpu")
    if OBSTACLE is not None:
        stages.tree_obstacle = lambda target_runner: OBSTACLE
