"""Groups of engines that fit on one machine at the same time, and their start and stop."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from bench.engine import EngineProcess
from bench.pairs import checkpoint
from bench.server import ServerProcess
from bench.vllm import VllmProcess
from bench.workload import Configuration, Workload


@dataclass(frozen=True)
class Candidate:
    """An engine to measure. `share` is the part of the GPU that it takes, or of a machine without one."""

    configuration: Configuration
    workload: Workload
    is_dummy: bool
    share: float


def pack(units: list[list[Candidate]]) -> list[list[Candidate]]:
    """Put every unit into the first group with room for it. A unit that fits nowhere is split."""
    groups: list[list[Candidate]] = []
    for unit in units:
        for part in [unit] if fits(unit) else [[candidate] for candidate in unit]:
            group = next((group for group in groups if fits(group + part)), None)
            if group is None:
                groups.append(part)
            else:
                group += part
    return groups


def fits(candidates: list[Candidate]) -> bool:
    return sum(candidate.share for candidate in candidates) < 1.001


@contextmanager
def running(
    candidates: list[Candidate], device: str, models: Path, logs: Path | None = None
) -> Iterator[list[tuple[Candidate, EngineProcess | ServerProcess]]]:
    """Start the engines of one group together, and yield those that are ready.

    Args:
        candidates: the group.
        device: "cuda" or "cpu".
        models: folder for dummy weights.
        logs: folder for the engines' logs; None: they are not kept.

    Raises:
        RuntimeError: an engine did not start. It is raised at the end, so that the others are still measured.
    """
    engines: list[tuple[Candidate, EngineProcess | ServerProcess]] = []
    failures: list[str] = []
    try:
        for candidate in candidates:
            engines.append((candidate, _start(candidate, device, models, logs)))
        ready = [(candidate, engine) for candidate, engine in engines if _is_ready(engine, failures)]
        yield ready
    finally:
        for _, engine in engines:
            engine.stop()
    if failures:
        raise RuntimeError("\n\n".join(failures))


def _is_ready(engine: EngineProcess | ServerProcess, failures: list[str]) -> bool:
    try:
        engine.wait_until_ready()
    except RuntimeError as error:
        failures.append(str(error))
        return False
    return True


def _start(candidate: Candidate, device: str, models: Path, logs: Path | None) -> EngineProcess | ServerProcess:
    configuration = candidate.configuration
    names = [name for name in (configuration.target, configuration.drafter) if name]
    positions = candidate.workload.positions if candidate.is_dummy else 0
    paths = {name: checkpoint(name, models, positions) for name in names}
    process = EngineProcess
    if candidate.workload.serving is not None:
        process = VllmProcess if configuration.mode == "vllm" else ServerProcess
    return process(configuration, candidate.workload, paths, device, candidate.is_dummy, _log_file(logs, configuration))


def _log_file(folder: Path | None, configuration: Configuration) -> TextIO:
    """Return an open file. A later engine of the same configuration appends to its log."""
    if folder is None:
        return tempfile.TemporaryFile("w+")
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{Path(configuration.drafter or configuration.target).name}, {configuration}"
    return (folder / f"{name.replace(', ', '_').replace(' ', '-')}.log").open("a+")
