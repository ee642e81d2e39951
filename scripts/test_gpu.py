"""Run tests/gpu, several processes at a time on each GPU.

SGLang takes most of a minute to start, and the small models of the tests use little of a GPU. The tests of a group
share engines. One process of pytest runs a group. The longest groups start first. A quarter of the processes starts
before the others, so that kernels are compiled once.

FOLDER gets `table.txt` with the result of each test as soon as it ends, a log per group, and answers of engines without
speculation. The same command again runs the tests that have no result yet.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "tests"))
from support import gpu_table  # noqa: E402

TESTS = REPO / "tests" / "gpu"
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(TESTS)]
# Seconds of each group, as measured. A group that is missing starts first.
SECONDS = TESTS / "seconds.json"
UNKNOWN = 300.0
# Part of the processes that start first, and seconds until the others do. The first ones compile kernels for all.
FIRST_PART, FIRST_SECONDS = 4, 90
# A terminated group ends its engines.
GRACE_SECONDS = 15


@dataclass(frozen=True)
class Group:
    """Tests that share engines.

    Attributes:
        name: see tests/gpu/conftest.py.
        tests: names in the table.
        alone: no other test may use the GPUs.
        gpus: how many they need.
        seconds: expected duration.
    """

    name: str
    tests: tuple[str, ...]
    alone: bool
    gpus: int
    seconds: float


def groups_of(listed: dict, seconds: dict[str, float]) -> list[Group]:
    """Return groups, the longest first.

    Args:
        listed: what `pytest --list-groups` writes.
        seconds: by group.
    """
    groups = [
        Group(name, tuple(of_group["tests"]), of_group["alone"], of_group["gpus"], seconds.get(name, UNKNOWN))
        for name, of_group in listed.items()
    ]
    return sorted(groups, key=lambda group: -group.seconds)


def part_of(groups: list[Group], part: int, num_parts: int, processes: int) -> list[Group]:
    """Return one of several parts of the groups that take about the same time; `part` begins with 1."""
    loads, parts = [0.0] * num_parts, [[] for _ in range(num_parts)]

    def load(group: Group) -> float:
        return group.seconds * (processes if group.alone else 1)

    for group in sorted(groups, key=load, reverse=True):
        least = loads.index(min(loads))
        loads[least] += load(group)
        parts[least].append(group)
    return sorted(parts[part - 1], key=lambda group: -group.seconds)


class Run:
    """Processes of pytest, each for one group."""

    def __init__(self, folder: Path, gpus: int, processes: int, deadline: float, pytest: list[str]) -> None:
        """
        Args:
            folder: see the module.
            gpus: number of GPUs.
            processes: at a time on each GPU.
            deadline: of `time.monotonic`; groups that still run then are ended.
            pytest: command without the options that differ by group.
        """
        self._folder, self._gpus, self._deadline = folder, gpus, deadline
        self._table = folder / "table.txt"
        self._slots = list(range(gpus * processes))
        self._running: dict[int, tuple[Group, subprocess.Popen, float]] = {}
        self._pytest = [*pytest, "--table", str(self._table), "--answers", str(folder / "answers")]
        self._printed = self._table.stat().st_size if self._table.exists() else 0
        self.seconds: dict[str, float] = {}
        self._started_at = time.monotonic()
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    def run(self, groups: list[Group]) -> None:
        for at_once in ([group for group in groups if not group.alone], *([g] for g in groups if g.alone)):
            waiting = list(at_once)
            while (waiting or self._running) and time.monotonic() < self._deadline:
                while waiting and self._slots and self._may_start():
                    self._start(waiting.pop(0))
                time.sleep(0.2)
                self._collect()
        self._end()

    def _may_start(self) -> bool:
        first = -(-(len(self._slots) + len(self._running)) // FIRST_PART)
        is_late = time.monotonic() - self._started_at > FIRST_SECONDS
        return len(self._running) < first or is_late or bool(gpu_table.read(self._table))

    def _start(self, group: Group) -> None:
        if group.seconds < UNKNOWN and time.monotonic() + group.seconds > self._deadline:
            self._write(f"not started, {group.seconds:.0f} s would be too long: {group.name}\n")
            return
        slot = self._slots.pop(0)
        # More threads than cores would slow each other down.
        env = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"} | os.environ
        if not group.alone:
            env["CUDA_VISIBLE_DEVICES"] = self._device(slot)
        with (self._folder / "logs" / f"{group.name}.log").open("w") as log:
            process = subprocess.Popen(
                [*self._pytest, "--group", group.name], env=env, stdout=log, stderr=log, cwd=REPO
            )
        self._running[slot] = group, process, time.monotonic()

    def _device(self, slot: int) -> str:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(i) for i in range(self._gpus)]
        return devices[slot % self._gpus]

    def _collect(self) -> None:
        """Take note of processes that have ended."""
        for slot, (group, process, started) in list(self._running.items()):
            if process.poll() is None:
                continue
            del self._running[slot]
            self._slots.append(slot)
            self._note_end(group, process, started)
        self._print()

    def _note_end(self, group: Group, process: subprocess.Popen, started: float) -> None:
        missing = set(group.tests) - set(gpu_table.read(self._table))
        took = time.monotonic() - started
        if missing:
            self._write(
                f"UNFINISHED after {took:.0f} s, exit status {process.returncode}: {group.name}, "
                f"{len(missing)} of {len(group.tests)} tests\n"
            )
        else:
            self.seconds[group.name] = round(took)

    def _end(self) -> None:
        """End what still runs."""
        for _, process, _ in self._running.values():
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        for group, process, started in self._running.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._note_end(group, process, started)
        self._running.clear()
        self._print()

    def _write(self, line: str) -> None:
        with self._table.open("a") as table:
            table.write(line)

    def _print(self) -> None:
        """Print what is new in the table."""
        if not self._table.exists():
            return
        with self._table.open() as table:
            table.seek(self._printed)
            print(table.read(), end="", flush=True)
            self._printed = table.tell()


def list_groups(folder: Path, pytest: list[str]) -> dict:
    listed = folder / "groups.json"
    command = [*pytest, "--collect-only", "--list-groups", str(listed)]
    collected = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    if collected.returncode != 0:
        sys.exit(f"pytest cannot collect tests/gpu:\n{collected.stdout[-8000:]}{collected.stderr[-4000:]}")
    return json.loads(listed.read_text())


def count_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 1
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return len(visible.split(","))
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True)
    return len(listed.stdout.splitlines())


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("groups", metavar="GROUP", nargs="*", help="groups to run (default: all)")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="run the I-th of N parts of about the same time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end what still runs after that time")
    parser.add_argument("--processes", type=int, default=12, help="at a time on each GPU (default 12)")
    parser.add_argument("--done", type=Path, metavar="TABLE", help="leave out tests that are in this table too")
    parser.add_argument("--list", action="store_true", help="print the groups, and run nothing")
    parser.add_argument("--pytest", default=[], type=str.split, help="more options of pytest")
    return parser.parse_intermixed_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    started, folder = time.monotonic(), options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    table, pytest = folder / "table.txt", [*PYTEST, *options.pytest]
    if options.done is not None:
        with table.open("a") as file:
            file.write(options.done.read_text())
    seconds = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    groups = groups_of(list_groups(folder, pytest), seconds)
    unknown = set(options.groups) - {group.name for group in groups}
    if unknown:
        sys.exit(f"tests/gpu has no groups {', '.join(sorted(unknown))}; --list prints them")
    gpus = count_gpus()
    too_large = [group.name for group in groups if group.gpus > gpus]
    if too_large:
        print(f"left out on {gpus} GPU{'s' if gpus > 1 else ''}: {', '.join(too_large)}")
        groups = [group for group in groups if group.gpus <= gpus]
    part, num_parts = map(int, options.part.split("/"))
    groups = part_of(groups, part, num_parts, options.processes * gpus)
    if options.groups:
        groups = [group for group in groups if group.name in options.groups]
    done = set(gpu_table.read(table))
    groups = [group for group in groups if not done.issuperset(group.tests)]
    if options.list:
        for group in groups:
            print(f"{group.seconds:5.0f} s  {group.name}{', alone' if group.alone else ''}: {len(group.tests)} tests")
        return 0
    run = Run(folder, gpus, options.processes, started + 60 * options.minutes, pytest)
    run.run(groups)
    # Measured with as many other groups as ran at a time.
    (folder / "seconds.json").write_text(json.dumps(seconds | run.seconds, indent=4, sort_keys=True) + "\n")
    outcomes = gpu_table.read(table)
    wanted = [test for group in groups for test in group.tests]
    failed = [test for test in wanted if outcomes.get(test) == "FAILED"]
    missing = [test for test in wanted if test not in outcomes]
    print(
        f"{len(wanted)} tests in {time.monotonic() - started:.0f} s: {len(failed)} failed, {len(missing)} have not run"
    )
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
