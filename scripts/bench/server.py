"""Measurement of one configuration by an HTTP server in its own process and SGLang's own benchmark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TextIO

import requests

from bench.client import BenchServing
from bench.engine import check_server, drafter_arguments, engine_arguments, environment, given_arguments
from bench.ports import claim_port
from bench.workload import SPARE_TOKENS, Configuration, Load, Workload


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


def server_arguments(
    configuration: Configuration, workload: Workload, paths: dict[str, str], device: str, is_dummy: bool
) -> dict:
    """Return the arguments of a server but for its ports. `paths` has the checkpoints by name."""
    if not workload.serving.default_flags:
        arguments = engine_arguments(configuration, workload, paths, device, is_dummy)
        return arguments | {"max_total_tokens": kv_tokens(workload)}
    arguments = {"model_path": paths[configuration.target]}
    if is_dummy:
        arguments["load_format"] = "dummy"
    if device == "cpu":
        arguments |= {"device": "cpu", "dtype": "float32", "attention_backend": "torch_native"}
    if configuration.tp > 1:
        arguments["tp_size"] = configuration.tp
    if configuration.mode != "none":
        arguments |= drafter_arguments(configuration, paths)
    return arguments | given_arguments(configuration, workload)


class ServerProcess:
    """SGLang's server for workloads with `serving`, with the methods of `EngineProcess`. It starts at once."""

    def __init__(
        self, configuration: Configuration, workload: Workload, paths: dict, device: str, is_dummy: bool, log: TextIO
    ):
        self.configuration = configuration
        self._workload, self._is_dummy = workload, is_dummy
        port, self._port_claim = claim_port()
        self._url = f"http://127.0.0.1:{port}"
        self._begun = time.perf_counter()
        self._start_figures: dict[str, float] = {}
        self._log = log
        self._http = requests.Session()
        self._http.trust_env = False  # no proxy
        self._process = subprocess.Popen(
            self._command(paths, device, port),
            env=self._environment(device),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self._client = BenchServing(environment("none", device))

    def _command(self, paths: dict[str, str], device: str, port: int) -> list[str]:
        """Return the command line that starts the server. `paths` has the checkpoints by name."""
        arguments = server_arguments(self.configuration, self._workload, paths, device, self._is_dummy)
        arguments |= {"host": "127.0.0.1", "port": port, "nccl_port": port + 1}
        return [sys.executable, "-m", "sglang.launch_server", *server_flags(arguments)]

    def _environment(self, device: str) -> dict[str, str]:
        """Return the server's environment."""
        workload = self._workload
        return environment(
            self.configuration.mode, device, self.configuration.tp, workload.accept_length, workload.recorded_drafts
        )

    def _check(self) -> None:
        """Check that the worker of the mode serves.

        Raises:
            RuntimeError: another one does.
        """
        info = self._http.get(f"{self._url}/server_info").json()
        # The size of a pool that SGLang chose is no error.
        tokens = 0 if self._workload.serving.default_flags else kv_tokens(self._workload)
        check_server(info, self.configuration.mode, tokens)
        if self.configuration.mode == "ours":
            graphs = info["internal_states"][0]["sglang_dflash"]["adaptive_graphs"]
            self._start_figures |= {} if graphs is None else {"graphs_gib": graphs["others"]["gib"]}

    def wait_until_ready(self) -> None:
        while not self._is_healthy():
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.configuration} failed:\n{self._log_tail()}")
            time.sleep(0.5)
        self._start_figures["start_s"] = time.perf_counter() - self._begun
        self._check()

    def _is_healthy(self) -> bool:
        try:
            return self._http.get(f"{self._url}/health", timeout=5).status_code == 200
        except requests.RequestException:
            return False

    def _log_tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-6000:]

    def warm_up(self, load: Load) -> None:
        """Do nothing: bench_serving warms up before each run."""

    def measure(self, load: Load) -> dict:
        """Return the figures of one run of bench_serving and of the start, by their names in `METRICS`."""
        mode = self.configuration.mode
        try:
            return self._client.run(self._url, self._workload, load, mode, self._is_dummy) | self._start_figures
        except RuntimeError as error:
            raise RuntimeError(f"{self.configuration}: {error}\n{self._log_tail()}") from error

    def stop(self) -> None:
        """End the server and every process that it started, in any state."""
        self._client.stop()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._http.close()
        self._port_claim.close()
        self._log.close()
