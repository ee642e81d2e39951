"""Real `sglang.launch_server` processes on the CPU, serving the tiny pair in float32, and requests to them."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests

from sglang_dflash.tiny_pair import DRAFTER_DIR, TARGET_DIR

BLOCK_SIZE = 16
START_SECONDS = 300
REQUEST_SECONDS = 300

# OMP: more than one thread per process makes busy cores wait for each other. The rest are SGLang's own checks of its
# pools, after every step: slots that leak, are freed twice, or are used after they were freed, end the server.
ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
BASE_FLAGS = {
    "model-path": str(TARGET_DIR),
    "device": "cpu",
    "dtype": "float32",
    "attention-backend": "torch_native",
    "max-total-tokens": 20000,
    "max-running-requests": 16,
}
DFLASH_FLAGS = {"speculative-algorithm": "DFLASH", "speculative-draft-model-path": str(DRAFTER_DIR)}


@dataclass(frozen=True)
class Settings:
    """What a server is started with, besides the pair: hashable, so that tests of the same settings share a server.

    Attributes:
        name: shown in the test's id.
        flags: of `launch_server`, without the dashes; a value of True is a flag without a value.
        dflash_flags: as `flags`, where speculation is on.
        env: on top of `ENV`.
    """

    name: str
    flags: tuple[tuple[str, Any], ...] = ()
    dflash_flags: tuple[tuple[str, Any], ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return self.name

    def command_line(self, dflash: bool) -> list[str]:
        flags = BASE_FLAGS | dict(self.flags)
        if dflash:
            flags |= DFLASH_FLAGS | dict(self.dflash_flags)
        return [
            part
            for flag, value in flags.items()
            for part in ([f"--{flag}"] if value is True else [f"--{flag}", str(value)])
        ]


class ServerError(RuntimeError):
    """The server died or never came up; the message ends with its log's tail."""


class Server:
    """One `python -m sglang.launch_server` on a free loopback port; a context manager that leaves no process."""

    def __init__(self, settings: Settings, *, dflash: bool, log_path: Path) -> None:
        self.log_path = log_path
        self.dflash = dflash
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._http = requests.Session()
        self._http.trust_env = False
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=64)
        self._http.mount("http://", adapter)
        command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port)]
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command + settings.command_line(dflash),
                env=os.environ | ENV | dict(settings.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        atexit.register(self.stop)

    def __enter__(self) -> Server:
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            self.check_alive()
            try:
                if self._http.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.25)
        raise ServerError(f"not ready after {START_SECONDS} s:\n{self.log_tail()}")

    def check_alive(self) -> None:
        if self._process.poll() is not None:
            raise ServerError(f"the server ended with {self._process.returncode}:\n{self.log_tail()}")

    def stop(self) -> None:
        """End the server and every process that it started."""
        atexit.unregister(self.stop)
        self._http.close()
        if self._process.poll() is not None:
            return
        processes = [psutil.Process(self._process.pid)]
        processes += processes[0].children(recursive=True)
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._process.wait()
        psutil.wait_procs(processes, timeout=30)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = 60) -> str:
        return f"{self.log_path}:\n" + "\n".join(self.log().splitlines()[-lines:])

    def get(self, path: str) -> requests.Response:
        return self._request("GET", path)

    def post(self, path: str, body: dict | None = None, *, stream: bool = False) -> requests.Response:
        return self._request("POST", path, json=body, stream=stream)

    def _request(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        try:
            return self._http.request(method, f"{self.url}{path}", timeout=REQUEST_SECONDS, **kwargs)
        except requests.RequestException as error:
            raise ServerError(f"{method} {path}: {error}\n{self.log_tail()}") from error

    def server_info(self) -> dict:
        response = self.get("/server_info")
        response.raise_for_status()
        return response.json()

    def internal_state(self) -> dict:
        return self.server_info()["internal_states"][0]

    def flush_cache(self) -> None:
        """Empty the radix cache; refused while a request is alive, so this waits for the last to be gone."""
        response = self.post("/flush_cache?timeout=30")
        assert response.status_code == 200, f"{response.text}\n{self.log_tail()}"

    def generate(self, input_ids: list, **body: Any) -> Any:
        """`/generate`, greedily: one answer for a prompt, a list of answers for a list of prompts.

        Sampling parameters are given by name among the other fields of the request.
        """
        response = self.post("/generate", generate_body(input_ids, body))
        assert response.status_code == 200, f"{response.status_code} {response.text}\n{self.log_tail()}"
        return response.json()

    def generate_concurrently(self, requests_: list[dict]) -> list[dict]:
        """Several requests at a time, each in its own HTTP connection: keywords of `generate`, answers in order."""
        with ThreadPoolExecutor(len(requests_)) as threads:
            return list(threads.map(lambda body: self.generate(**body), requests_))

    def stream(self, input_ids: list[int], **body: Any) -> Iterator[dict]:
        """`/generate` with `stream`: the chunks as they come; closing the iterator disconnects."""
        response = self.post("/generate", generate_body(input_ids, body) | {"stream": True}, stream=True)
        with response:
            assert response.status_code == 200, f"{response.status_code} {response.text}\n{self.log_tail()}"
            for line in response.iter_lines():
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    yield json.loads(line.removeprefix(b"data: "))


SAMPLING = ("max_new_tokens", "ignore_eos", "stop", "stop_token_ids", "n", "no_stop_trim", "temperature")


def generate_body(input_ids: list, body: dict[str, Any]) -> dict[str, Any]:
    sampling = {"temperature": 0} | {name: body[name] for name in SAMPLING if name in body}
    rest = {name: value for name, value in body.items() if name not in SAMPLING}
    return {"input_ids": input_ids, "sampling_params": sampling} | rest
