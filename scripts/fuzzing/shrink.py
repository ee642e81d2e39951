"""Search for the smallest part of a case that still fails: fewer requests, then fewer fields."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

from fuzzing.cases import Case

# True if a part of a case fails in the same way. May change the case it gets.
Fails = Callable[[Case], bool]
# Fields of a request that stay.
_PROMPTS = ("input_ids", "text", "prompt", "messages")
_KEPT = (
    *_PROMPTS,
    "model",
    "sampling_params",
    "temperature",
    "max_new_tokens",
    "max_tokens",
    "rid",
    "stream",
    "stream_options",
)


def shrink(case: Case, fails: Fails, seconds: float) -> Case:
    """Leave out what the failure does not need.

    Args:
        case: a failing case.
        fails: tells which parts of it fail.
        seconds: time limit.
    """
    deadline = time.monotonic() + seconds

    def still_fails(smaller: Case) -> bool:
        return time.monotonic() < deadline and fails(copy.deepcopy(smaller))

    case = _fewer_requests(case, still_fails)
    return _fewer_fields(case, still_fails)


def _numbered(case: Case) -> list[tuple[int, dict]]:
    return [(i, request) for i, row in enumerate(case.rounds) for request in row]


def _with(case: Case, numbered: list[tuple[int, dict]]) -> Case:
    """Return a case with some of the requests, in their rounds."""
    smaller = copy.copy(case)
    rounds = [[request for number, request in numbered if number == i] for i in range(len(case.rounds))]
    smaller.rounds = [row for row in rounds if row]
    return smaller


def _fewer_requests(case: Case, fails: Fails) -> Case:
    """Leave out halves, quarters and so on of the requests, down to single ones."""
    kept = _numbered(case)
    size = max(1, len(kept) // 2)
    while True:
        start = 0
        while start < len(kept) and len(kept) > 1:
            fewer = kept[:start] + kept[start + size :]
            if fewer and fails(_with(case, fewer)):
                kept = fewer
            else:
                start += size
        if size == 1:
            return _with(case, kept)
        size //= 2


def _fewer_fields(case: Case, fails: Fails) -> Case:
    """Leave out the fields of the requests that remain, one by one, and shorten their prompts."""
    for i, row in enumerate(case.rounds):
        for j, request in enumerate(row):
            if not isinstance(request.get("body"), dict):
                continue
            for path in _removable(request["body"]):
                case = _if_fails(case, fails, i, j, lambda body, path=path: _without(body, path))
            while True:
                shorter = _if_fails(case, fails, i, j, _half_prompt)
                if shorter is case:
                    break
                case = shorter
    return case


def _if_fails(case: Case, fails: Fails, i: int, j: int, change: Callable[[dict], dict | None]) -> Case:
    """Return the case with one body changed if that still fails, else the case."""
    body = change(case.rounds[i][j]["body"])
    if body is None:
        return case
    smaller = copy.deepcopy(case)
    smaller.rounds[i][j]["body"] = body
    return smaller if fails(smaller) else case


def _removable(body: dict) -> list[tuple[str, ...]]:
    """Return the paths of the fields that may be left out. Without a temperature, answers would differ by chance."""
    params = body.get("sampling_params")
    names = list(params) if isinstance(params, dict) else []
    paths = [(name,) for name in body if name not in _KEPT]
    return paths + [("sampling_params", name) for name in names if name not in _KEPT]


def _without(body: dict, path: tuple[str, ...]) -> dict:
    changed = copy.deepcopy(body)
    parent = changed
    for name in path[:-1]:
        parent = parent[name]
    del parent[path[-1]]
    return changed


def _half_prompt(body: dict) -> dict | None:
    ids = body.get("input_ids")
    if not (isinstance(ids, list) and len(ids) > 1 and isinstance(ids[0], int)):
        return None
    return body | {"input_ids": ids[: len(ids) // 2]}
