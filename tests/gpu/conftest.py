import fcntl
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from models.tiny import TARGET_DIR, load_prompts


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu" in str(item.path) and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Return the tiny pair's prompts: 60 of 20 to 200 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR)
    return [tokenizer(prompt)["input_ids"] for prompt in load_prompts()]


class Shared:
    """Answers that several tests compare with, in a folder that several processes may share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, compute: Callable[[], object]) -> object:
        """Return the JSON object that `compute` returned for the first caller with this `name`."""
        path = self._folder / f"{re.sub('[^A-Za-z0-9_.-]', '-', name)}.json"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                written = path.with_suffix(".new")
                written.write_text(json.dumps(compute()))
                written.rename(path)
        return json.loads(path.read_text())


@pytest.fixture(scope="session")
def shared(request, tmp_path_factory) -> Shared:
    return Shared(Path(request.config.getoption("--answers") or tmp_path_factory.mktemp("answers")))
