"""Measurement of vLLM's own DFlash by its server in its own process, from an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench.engine import chain_length
from bench.server import ServerProcess
from bench.workload import Configuration, Load, Workload

# Counters of `/metrics`.
_DRAFTS, _ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"


def vllm_version(python: str) -> str:
    """Return the versions of vLLM and of its torch.

    Args:
        python: interpreter of their environment.

    Raises:
        ValueError: there is no vLLM.
    """
    query = "from importlib.metadata import version; print(f\"vllm {version('vllm')} on torch {version('torch')}\")"
    try:
        found = subprocess.run([python, "-c", query], env=own_environment(), capture_output=True, text=True)
    except OSError as error:
        raise ValueError(f"--vllm-python {python}: {error}") from error
    if found.returncode:
        raise ValueError(f"--vllm-python {python}: {found.stderr.strip().splitlines()[-1]}")
    return found.stdout.strip()


def own_environment() -> dict[str, str]:
    """Return an environment without this process's packages."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # bench_serving empties the prefix cache by an endpoint of this mode.
    return env | {"VLLM_SERVER_DEV_MODE": "1"}


def vllm_flags(configuration: Configuration, workload: Workload, paths: dict[str, str], is_dummy: bool) -> list[str]:
    """Return flags of vLLM's server, but for its address. `paths` has the checkpoints by name."""
    drafter = paths[configuration.drafter]
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": block_size(drafter) - 1}
    accept_length = chain_length(workload.accept_length, workload.recorded_drafts)
    if accept_length is not None:
        speculative |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": accept_length}
    flags = ["--model", paths[configuration.target], "--speculative-config", json.dumps(speculative)]
    if is_dummy:
        flags += ["--load-format", "dummy"]
    if configuration.tp > 1:
        flags += ["--tensor-parallel-size", str(configuration.tp)]
    return flags


def block_size(drafter: str) -> int:
    """Return the block size of a drafter, which vLLM has to be told.

    Raises:
        ValueError: its config does not say.
    """
    config = Path(drafter, "config.json")
    if not config.is_file():
        raise ValueError(f"--modes vllm: {drafter} is not a local folder with a config.json.")
    size = json.loads(config.read_text()).get("block_size")
    if not isinstance(size, int):
        raise ValueError(f"--modes vllm: block_size of {config} is {size!r}; expected a number.")
    return size


class VllmProcess(ServerProcess):
    """vLLM's server with DFlash, with the methods of `ServerProcess`. It starts at once."""

    def _command(self, paths: dict[str, str], device: str, port: int) -> list[str]:
        flags = vllm_flags(self.configuration, self._workload, paths, self._is_dummy)
        module = "vllm.entrypoints.openai.api_server"
        python = self._workload.serving.vllm_python
        return [python, "-m", module, "--host", "127.0.0.1", "--port", str(port), *flags]

    def _environment(self, device: str) -> dict[str, str]:
        return own_environment()

    def _check(self) -> None:
        response = self._http.get(f"{self._url}/version")
        if response.status_code != 200 or "version" not in response.json():
            raise RuntimeError(f"{self.configuration}: /version answers {response.status_code} {response.text[:200]}")

    def measure(self, load: Load) -> dict:
        """Return the figures of one run. The acceptance length includes that of the warm-up."""
        before = self._counts()
        found = super().measure(load)
        drafts, accepted = (after - count for after, count in zip(self._counts(), before, strict=True))
        if not drafts:
            raise RuntimeError(f"{self.configuration}: vLLM verified no drafts")
        return found | {"accept_length": 1 + accepted / drafts}

    def _counts(self) -> tuple[float, float]:
        """Return the cycles of requests and the accepted drafts so far."""
        text = self._http.get(f"{self._url}/metrics").text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return tuple(sum(sample.value for sample in samples if sample.name == name) for name in (_DRAFTS, _ACCEPTED))
