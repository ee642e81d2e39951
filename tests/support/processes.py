"""Programs that use SGLang in other processes, either spawned or forked from a process that has imported SGLang.

On a machine with a GPU that process has imported SGLang's libraries only; see launcher.py.

A program is given as the arguments of `python`: `-m MODULE ...`, `-c CODE` or `FILE ...`. It leads a session, which no
process of SGLang leaves.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import torch

# What a launcher imports; see launcher.py.
IMPORTED = "libraries" if torch.cuda.is_available() else "modules"
# Variables that no module reads on import. Programs that differ in them are forked from one process.
READ_LATE = {
    "DEFAULT_TREES_OBSTACLE",
    "KNOWN_TEXT",
    "MC_FORCE_TCP",
    "MOONCAKE_PROTOCOL",
    "ORACLE_CANDIDATES",
    "ORACLE_DRAFTS",
    "PLANTED_ERROR",
    # Of plugins.
    "PYTHONPATH",
    "SGLANG_CPU_OMP_THREADS_BIND",
    "SGLANG_DFLASH_RECORDED_DRAFTS",
    "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR",
    "SGLANG_HOST_IP",
    "SGLANG_MAMBA_CONV_DTYPE",
    "SGLANG_PLUGINS",
    "SGLANG_RUST_SERVER",
    "SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT",
}


def is_read_late(name: str) -> bool:
    """Return whether no module of a launcher reads an environment variable on import."""
    # Libraries read none of SGLang's.
    return name in READ_LATE or (IMPORTED == "libraries" and name.startswith("SGLANG_"))


class Process:
    """A running program, by its process id."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def is_running(self) -> bool:
        return not self._has_ended(0)

    def wait(self, timeout: float) -> int | None:
        """Return the exit status; None if the program still runs after `timeout` seconds."""
        return self._status() if self._has_ended(timeout) else None

    def end(self) -> None:
        """Kill the program and all processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        # It may not be the leader of its session yet.
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._has_ended(None)
        os.close(self._pidfd)

    def _has_ended(self, timeout: float | None) -> bool:
        return bool(select.select([self._pidfd], [], [], timeout)[0])

    def _status(self) -> int:
        raise NotImplementedError


class Spawned(Process):
    def __init__(self, arguments: list[str], env: dict[str, str], stdout: Path, stderr: Path) -> None:
        with stdout.open("ab") as output, stderr.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        super().__init__(self._process.pid)

    def end(self) -> None:
        super().end()
        self._status()

    def _status(self) -> int:
        return self._process.wait()


class Forked(Process):
    def __init__(self, pid: int, launcher: Launcher) -> None:
        super().__init__(pid)
        self._launcher = launcher

    def _status(self) -> int:
        return self._launcher.ask(self.pid)


class Launcher:
    """A `launcher.py` with an environment, which its programs share. It ends with this process."""

    def __init__(self, env: dict[str, str], log_path: Path) -> None:
        self._log_path = log_path
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, Path(__file__).with_name("launcher.py"), IMPORTED],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def start(self, arguments: list[str], env: dict[str, str], stdout: Path, stderr: Path) -> Forked:
        request = {"arguments": arguments, "env": env, "stdout": str(stdout), "stderr": str(stderr)}
        return Forked(self.ask(request), self)

    def ask(self, request: dict | int) -> int:
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"launcher.py has ended\n{self._log_path.read_text(errors='replace')[-4000:]}"
        return int(answer)

    def stop(self) -> None:
        """End the launcher. Its programs continue."""
        with suppress(BrokenPipeError):
            self._process.communicate(b"null\n")


# Launchers by environment. The ones used last are kept.
_launchers: dict[tuple, Launcher] = {}
_MAX_LAUNCHERS = 2


def _launcher(env: dict[str, str], log_path: Path) -> Launcher:
    key = tuple(sorted(env.items()))
    launcher = _launchers.pop(key, None)
    if launcher is None:
        if len(_launchers) == _MAX_LAUNCHERS:
            _launchers.pop(next(iter(_launchers))).stop()
        launcher = Launcher(env, log_path)
    _launchers[key] = launcher
    return launcher


def start(
    arguments: list[str], env: dict[str, str], stdout: Path, stderr: Path | None = None, *, spawn: bool = False
) -> Process:
    """Start a program.

    Args:
        arguments: of `python`.
        env: variables to add to this process's environment.
        stdout: a file.
        stderr: a file; None for the file of `stdout`.
        spawn: spawn the program, as users start it, so that each process imports SGLang.
    """
    stderr = stderr or stdout
    env = os.environ | env
    # Pytest changes this variable with every test.
    env.pop("PYTEST_CURRENT_TEST", None)
    if spawn:
        return Spawned(arguments, env, stdout, stderr)
    late = {name: value for name, value in env.items() if is_read_late(name)}
    # Of these, the launcher has this process's own.
    common = {name: value for name, value in env.items() if name not in late}
    common |= {name: os.environ[name] for name in late.keys() & os.environ.keys()}
    return _launcher(common, stdout.with_suffix(".launcher")).start(arguments, late, stdout, stderr)


def run(
    arguments: list[str], env: dict[str, str], folder: Path, *, spawn: bool = False, timeout: float = 180
) -> tuple[int, str, str]:
    """Run a program that writes its files to `folder`. Return its exit status, its stdout and its stderr."""
    stdout, stderr = folder / "stdout", folder / "stderr"
    process = start(arguments, env, stdout, stderr, spawn=spawn)
    try:
        status = process.wait(timeout)
    finally:
        process.end()
    assert status is not None, f"still running:\n{stderr.read_text()[-4000:]}"
    return status, stdout.read_text(), stderr.read_text()
