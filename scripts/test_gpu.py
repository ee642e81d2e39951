"""Run tests/gpu, several processes at a time on each GPU.

SGLang takes most of a minute to start, and the small models of the tests use little of a GPU. The tests of a group
share engines. A process of pytest takes half a minute to start, and runs many groups, one at a time. The longest groups
start first.

FOLDER gets `table.txt` with the result of each test as soon as it ends, logs of the processes and of tests that fail,
and answers of engines without speculation. The same command again runs the tests that have no result yet.
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
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "tests"))
from support import gpu_table  # noqa: E402

TESTS = REPO / "tests" / "gpu"
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(TESTS)]
# Seconds of each group, as measured. A group that is missing starts first.
SECONDS = TESTS / "seconds.json"
UNKNOWN = 300.0
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


class Worker:
    """A process of pytest that runs groups, one at a time. It starts at once.

    Attributes:
        group: that it runs, or None.
    """

    def __init__(self, pytest: list[str], env: dict[str, str], log: Path) -> None:
        self._arguments = pytest, env, log
        self._control, passed = Pipe()
        with log.open("a") as output:
            self._process = subprocess.Popen(
                [*pytest, "--worker", str(passed.fileno())],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=REPO,
                pass_fds=[passed.fileno()],
            )
        passed.close()
        self.group: Group | None = None
        self._started_at = 0.0

    def another(self) -> Worker:
        """Return a new process in place of this one, which has ended."""
        self._control.close()
        return Worker(*self._arguments)

    def start(self, group: Group) -> None:
        self.group, self._started_at = group, time.monotonic()
        # A process that has ended is noticed by `is_running`.
        with suppress(BrokenPipeError):
            self._control.send(group.name)

    def is_running(self) -> bool:
        """Return whether its group still runs. It does not if the process has ended."""
        return not self._control.poll()

    def take_result(self) -> tuple[Group, float, int | None]:
        """Return the group that has ended, its seconds, and the exit status if the process has ended with it."""
        group, self.group = self.group, None
        status = None
        try:
            self._control.recv()
        except (EOFError, ConnectionResetError):
            status = self._process.wait()
        return group, self.seconds(), status

    def seconds(self) -> float:
        """Return the time since the last group has started."""
        return time.monotonic() - self._started_at

    def end(self) -> None:
        """End the process, at once if it runs a group."""
        self._control.close()
        if self.group is not None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float) -> int:
        """Return the exit status of a process that `end` ends. It is killed after `timeout` seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class Run:
    """Groups of tests, several at a time.

    Its processes start at once. They end with this process, too.
    """

    def __init__(self, folder: Path, devices: list[str], processes: int, deadline: float, pytest: list[str]) -> None:
        """
        Args:
            folder: see the module.
            devices: see `visible_devices`.
            processes: number of processes on all GPUs. There is one more for groups that run alone.
            deadline: of `time.monotonic`; groups that still run then are ended.
            pytest: command without the options that a run adds.
        """
        self._folder, self._deadline = folder, deadline
        self._table = folder / "table.txt"
        self._pytest = [*pytest, "--table", str(self._table), "--answers", str(folder / "answers")]
        self._printed = self._table.stat().st_size if self._table.exists() else 0
        self.seconds: dict[str, float] = {}
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self._workers = [
            self._worker(str(i), {"CUDA_VISIBLE_DEVICES": devices[i % len(devices)]}) for i in range(processes)
        ]
        self._alone = [self._worker("alone", {})]

    def run(self, groups: list[Group]) -> None:
        """Run groups in their order, those that run alone last, and end the processes."""
        self._run([group for group in groups if not group.alone], self._workers)
        self._run([group for group in groups if group.alone], self._alone)

    def _run(self, groups: list[Group], workers: list[Worker]) -> None:
        """Run groups, and end the workers."""
        waiting = list(groups)
        while time.monotonic() < self._deadline:
            for worker in workers:
                if worker.group is None and waiting:
                    self._start(waiting.pop(0), worker)
            if not waiting and all(worker.group is None for worker in workers):
                break
            time.sleep(0.2)
            workers = [self._collect(worker) for worker in workers]
            self._print()
        self._end(workers)

    def _collect(self, worker: Worker) -> Worker:
        """Take note of a group that has ended. Return the worker, or another one if it has ended too."""
        if worker.group is None or worker.is_running():
            return worker
        group, took, status = worker.take_result()
        self._note_end(group, took, status)
        return worker if status is None else worker.another()

    def _worker(self, name: str, env: dict[str, str]) -> Worker:
        # More threads than cores would slow each other down.
        env = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"} | os.environ | env
        return Worker(self._pytest, env, self._folder / "logs" / f"worker-{name}.log")

    def _start(self, group: Group, worker: Worker) -> None:
        if group.seconds < UNKNOWN and time.monotonic() + group.seconds > self._deadline:
            self._write(f"not started, {group.seconds:.0f} s would be too long: {group.name}\n")
            return
        worker.start(group)

    def _note_end(self, group: Group, took: float, status: int | None) -> None:
        missing = set(group.tests) - set(gpu_table.read(self._table))
        if missing:
            ended = "" if status is None else f", exit status {status}"
            self._write(
                f"UNFINISHED after {took:.0f} s{ended}: {group.name}, {len(missing)} of {len(group.tests)} tests\n"
            )
        else:
            self.seconds[group.name] = round(took)

    def _end(self, workers: list[Worker]) -> None:
        """End workers and what they still run."""
        for worker in workers:
            worker.end()
        deadline = time.monotonic() + GRACE_SECONDS
        for worker in workers:
            status = worker.wait(max(0.1, deadline - time.monotonic()))
            if worker.group is not None:
                self._note_end(worker.group, worker.seconds(), status)
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


def visible_devices() -> list[str]:
    """Return the GPUs that tests may use, as `CUDA_VISIBLE_DEVICES` names them; without `nvidia-smi` one of them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shutil.which("nvidia-smi") is None:
        return (visible or "0").split(",")[:1]
    if visible:
        return visible.split(",")
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True)
    return [str(i) for i in range(len(listed.stdout.splitlines()))]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("groups", metavar="GROUP", nargs="*", help="groups to run (default: all)")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="run the I-th of N parts of about the same time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end what still runs after that time")
    parser.add_argument("--processes", type=int, default=14, help="at a time on each GPU (default 14)")
    parser.add_argument("--done", type=Path, metavar="TABLE", help="leave out tests that are in this table too")
    parser.add_argument("--list", action="store_true", help="print the groups, and run nothing")
    parser.add_argument("--pytest", default=[], type=str.split, help="more options of pytest")
    return parser.parse_intermixed_args(arguments)


def chosen_groups(options: argparse.Namespace, listed: dict, seconds: dict[str, float], gpus: int) -> list[Group]:
    """Return the groups that are to run, the longest first.

    Args:
        options: see `parse`.
        listed: what `pytest --list-groups` writes.
        seconds: by group.
        gpus: number of GPUs.
    """
    groups = groups_of(listed, seconds)
    unknown = set(options.groups) - {group.name for group in groups}
    if unknown:
        sys.exit(f"tests/gpu has no groups {', '.join(sorted(unknown))}; --list prints them")
    too_large = [group.name for group in groups if group.gpus > gpus]
    if too_large:
        print(f"left out on {gpus} GPU{'s' if gpus > 1 else ''}: {', '.join(too_large)}")
        groups = [group for group in groups if group.gpus <= gpus]
    part, num_parts = map(int, options.part.split("/"))
    groups = part_of(groups, part, num_parts, options.processes * gpus)
    if options.groups:
        groups = [group for group in groups if group.name in options.groups]
    done = set(gpu_table.read(options.folder / "table.txt"))
    return [group for group in groups if not done.issuperset(group.tests)]


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    started = time.monotonic()
    folder = options.folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    table, pytest = folder / "table.txt", [*PYTEST, *options.pytest]
    if options.done is not None:
        with table.open("a") as file:
            file.write(options.done.read_text())
    seconds = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    devices = visible_devices()
    gpus = len(devices)
    if options.list:
        for group in chosen_groups(options, list_groups(folder, pytest), seconds, gpus):
            print(f"{group.seconds:5.0f} s  {group.name}{', alone' if group.alone else ''}: {len(group.tests)} tests")
        return 0
    processes = options.processes * gpus
    if options.groups:
        processes = min(processes, len(options.groups))
    # Its processes start while pytest lists the groups.
    run = Run(folder, devices, processes, started + 60 * options.minutes, pytest)
    groups = chosen_groups(options, list_groups(folder, pytest), seconds, gpus)
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
