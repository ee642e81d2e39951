"""Measurement of one configuration by `sglang.launch_server` in its own process and SGLang's own benchmark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time

import requests

from bench.client import bench_serving
from bench.engine import SPARE_TOKENS, Configuration, Load, Workload, check_server, engine_arguments, environment
from bench.ports import claim_port


def server_flags(arguments: dict) -> list[str]:
    """Return arguments of `sglang.Engine` as flags of `sglang.launch_server`."""
    flags = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif isinstance(value, list):
            flags += [flag, *map(str, value)]
        elif value is not False:
            flags += [flag, str(value)]
    return flags


def kv_tokens(workload: Workload) -> int:
    """Return the KV slots for as many requests as there are clients. Servers that are compared share the GPU."""
    longest = max(
        workload.serving.context_tokens if prompts.tokens is None else prompts.tokens + workload.new_tokens
        for prompts in workload.prompts
    )
    return max(workload.concurrency) * (longest + SPARE_TOKENS)


class ServerProcess:
    """A server for workloads with `serving`, with the methods of `EngineProcess`. It starts at once."""

    def __init__(self, configuration: Configuration, workload: Workload, paths: dict, device: str, is_dummy: bool):
        self.configuration = configuration
        self._workload, self._device, self._is_dummy = workload, device, is_dummy
        port, self._port_claim = claim_port()
        self._url = f"http://127.0.0.1:{port}"
        arguments = engine_arguments(configuration, workload, paths, device, is_dummy)
        arguments |= {
            "max_total_tokens": kv_tokens(workload),
            "host": "127.0.0.1",
            "port": port,
            "nccl_port": port + 1,
        }
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *server_flags(arguments)],
            env=environment(
                configuration.mode, device, configuration.tp, workload.accept_length, workload.recorded_drafts
            ),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def wait_until_ready(self) -> None:
        with requests.Session() as http:
            http.trust_env = False  # no proxy
            while not self._is_healthy(http):
                if self._process.poll() is not None:
                    raise RuntimeError(f"{self.configuration} failed:\n{self._log_tail()}")
                time.sleep(0.5)
            info = http.get(f"{self._url}/server_info").json()
        check_server(info, self.configuration.mode, kv_tokens(self._workload))

    def _is_healthy(self, http: requests.Session) -> bool:
        try:
            return http.get(f"{self._url}/health", timeout=5).status_code == 200
        except requests.RequestException:
            return False

    def _log_tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-6000:]

    def warm_up(self, load: Load) -> None:
        """Do nothing: bench_serving warms up before each run."""

    def measure(self, load: Load) -> dict:
        """Return the figures of one run of bench_serving, by their names in `METRICS`."""
        try:
            return bench_serving(self._url, self._workload, load, self._is_dummy, environment("none", self._device))
        except RuntimeError as error:
            raise RuntimeError(f"{self.configuration}: {error}\n{self._log_tail()}") from error

    def stop(self) -> None:
        """End the server and every process that it started, in any state."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._port_claim.close()
