"""Prompts whose KV leaves the GPU and comes back, and the files it is stored in."""

import time
from pathlib import Path

PAGE_SIZE = 16
_SECONDS = 30


def long_texts(prompts: list[list[int]], number: int) -> list[list[int]]:
    """Return `number` prompts of several hundred tokens. Nine of them do not fit into the pool of the tests."""
    return [sum(prompts[4 * i : 4 * i + 4], [])[: 440 - 16 * i] for i in range(number)]


def wait_until_stored(folder: Path, texts: list[list[int]]) -> None:
    """Wait until a server has written every page: a file of the target's KV and one of the drafter's."""
    num_pages = sum(len(text) // PAGE_SIZE for text in texts)
    deadline = time.monotonic() + _SECONDS
    while len(list(folder.iterdir())) < 2 * num_pages:
        assert time.monotonic() < deadline, "the pages are not written"
        time.sleep(0.2)


def stored_lens(texts: list[list[int]]) -> list[int]:
    """Return how many tokens of each text come from files. At least one token is prefilled."""
    return [(len(text) - 1) // PAGE_SIZE * PAGE_SIZE for text in texts]
