"""Engines that tests share: one process serves one configuration at a time, and answers the requests of many tests."""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from support.engine_process import EngineProcess
from support.plugins import python_path

from models.tiny import DRAFTER_DIR, TARGET_DIR
from sglang_dflash.checkpoint.config import DEFAULT_CANDIDATES

# Without a GPU, tests are rehearsed on SGLang's CPU engine (`--rehearse`).
ON_CPU = not torch.cuda.is_available()
# Sizes of CUDA graphs. Some batches of up to 8 requests are padded. Each size takes time to capture.
GRAPH_SIZES = [1, 4, 8]
# Arguments that all engines share. The token limit bounds SGLang's memory; other tests may use the rest of the GPU.
COMMON = {
    "dtype": "bfloat16",
    "max_total_tokens": 30_000,
    "max_running_requests": 8,
    "mem_fraction_static": 0.98,
    "cuda_graph_bs_decode": GRAPH_SIZES,
    "disable_prefill_cuda_graph": True,
    "skip_server_warmup": True,
    # A draft length that adapts depends on the machine.
    "speculative_adaptive_config": "fixed",
}
ADAPTIVE = {"speculative_adaptive": True, "speculative_adaptive_config": None}
# Drafts are verified in trees by default.
TREES = {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(DRAFTER_DIR)}
CHAINS = TREES | {"speculative_eagle_topk": 1}
SHAPES = {"chains": CHAINS, "trees": TREES}
# Requests lose their KV slots now and then, and are prefilled again.
RETRACTED = {
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "11",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
}
# Attention of the tests' backends in float32: Triton must not multiply in TF32.
IEEE = {"TRITON_F32_DEFAULT": "ieee"}
BACKENDS = ["fa3", "flashinfer", "triton"]
# Arguments for the best two tokens at every position, of which `support.ties` knows a tie.
BEST_TWO = {"return_logprob": True, "top_logprobs_num": 2}

_CUDA_ONLY = ("mem_fraction_static", "disable_prefill_cuda_graph", "enable_deterministic_inference", "kv_cache_dtype")


@dataclass(frozen=True)
class EngineConfig:
    """Configuration of an Engine.

    Attributes:
        name: names the answers of Engines without speculation, also for other processes.
        arguments: of `sglang.Engine`.
        env: environment variables.
        plugins: of tests/plugins. A plugin that writes records does so while `Engines.checking` asks for them.
    """

    name: str
    arguments: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def key(self) -> str:
        return json.dumps([self.arguments, self.env, self.plugins], sort_keys=True)

    def on_this_machine(self) -> EngineConfig:
        """Return the configuration, or without a GPU the nearest one on a CPU."""
        if not ON_CPU:
            return self
        arguments = {name: value for name, value in self.arguments.items() if name not in _CUDA_ONLY}
        sizes = arguments.pop("cuda_graph_bs_decode", None)
        for name in [name for name in arguments if "cuda_graph" in name and "disable" not in name]:
            del arguments[name]
        is_dflash = "speculative_algorithm" in arguments
        arguments |= {"device": "cpu", "attention_backend": "torch_native", "dtype": "float32"}
        arguments.pop("speculative_draft_attention_backend", None)
        plugins = self.plugins
        if is_dflash:
            # As on a GPU by default.
            is_exact = "enable_deterministic_inference" in self.arguments
            arguments.setdefault("speculative_eagle_topk", 1 if is_exact else DEFAULT_CANDIDATES)
            if sizes is not None and not arguments.get("disable_cuda_graph"):
                plugins, arguments = (*plugins, "eager_graphs"), arguments | {"cuda_graph_bs_decode": sizes}
        # States of recurrent layers are then those of float32 too.
        env = dict(self.env) | {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
        return replace(self, arguments=arguments, plugins=plugins, env=env)


class Shared:
    """Answers that several tests compare with, in a folder that several processes may share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, compute: Callable[[], object]) -> object:
        """Return the JSON object that `compute` returned for the first caller with this `name`."""
        path = self._folder / f"{re.sub('[^A-Za-z0-9_.-]', '-', name)}.json"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                written = path.with_suffix(".new")
                written.write_text(json.dumps(compute()))
                written.rename(path)
        return json.loads(path.read_text())


class Engines:
    """The Engine of the last configuration that a test asked for, which runs until another is asked for.

    Attributes:
        shared: answers of Engines without speculation.
    """

    def __init__(self, folder: Path, shared: Shared) -> None:
        self._folder, self.shared = folder, shared
        self._key, self._engine = "", None
        self._started, self._failed = 0, ""

    def ask(self, config: EngineConfig, calls: list[dict], timeout: float = 300) -> list:
        """Return what calls of an Engine return; see `EngineProcess.ask`."""
        return self._ask(config, calls, timeout)[0]

    def describe(self, config: EngineConfig) -> dict | None:
        """Return DFLASH's part of `/server_info`; None without DFLASH."""
        return self._ask(config, [])[1]

    def log(self, config: EngineConfig) -> str:
        return self._on(config).log()

    def log_tail(self) -> str:
        """Return the end of the log of the present Engine, or of one that has failed."""
        return self._failed if self._engine is None else self._engine.log_tail()

    def reference(self, config: EngineConfig, calls: list[dict]) -> list:
        """Return the answers of an Engine without speculation, with the best two tokens at every position.

        They are computed once in all processes that share a folder of answers.
        """
        asked = [call | BEST_TWO for call in calls]
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]
        return self.shared.get(f"{config.name}-{digest}", lambda: self.ask(config, asked))

    @contextmanager
    def checking(self, config: EngineConfig, plugin: str) -> Iterator[list[dict]]:
        """Have a plugin of an Engine write records, which are in the list afterwards."""
        self._ask(config, [])
        path, records = self._folder / f"{plugin}.jsonl", []
        path.touch()
        try:
            yield records
        finally:
            lines = path.read_text().splitlines()
            path.unlink()
            records.extend(json.loads(line) for line in lines)

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.stop()
        self._key, self._engine = "", None

    def _ask(self, config: EngineConfig, calls: list[dict], timeout: float = 300) -> tuple[list, dict | None]:
        try:
            return self._on(config).ask(calls, timeout)
        except (AssertionError, OSError):
            # The next test gets another Engine.
            self._failed = self.log_tail()
            self.stop()
            raise

    def _on(self, config: EngineConfig) -> EngineProcess:
        config = config.on_this_machine()
        if self._key != config.key:
            self.stop()
            records = {f"{name.upper()}_RECORDS": str(self._folder / f"{name}.jsonl") for name in config.plugins}
            env = dict(config.env) | records
            if config.plugins:
                env["PYTHONPATH"] = python_path(*config.plugins)
            self._started, self._failed = self._started + 1, ""
            folder = self._folder / f"{self._started:02d}-{config.name}"
            folder.mkdir()
            self._engine, self._key = EngineProcess(dict(config.arguments), env, folder), config.key
        return self._engine


def tiny(name: str, shape: str | None = None, **arguments: Any) -> EngineConfig:
    """Return a configuration of the tiny pair.

    Args:
        shape: "chains" or "trees"; None: no speculation.
        arguments: more of them.
    """
    dflash = {} if shape is None else SHAPES[shape]
    return EngineConfig(name, {"model_path": str(TARGET_DIR)} | COMMON | dflash | arguments)


def greedy(prompts: list[list[int]], lengths: int | list[int], **more: Any) -> dict:
    """Return a call for greedy answers of these lengths."""
    lengths = [lengths] * len(prompts) if isinstance(lengths, int) else lengths
    sampling = [{"temperature": 0, "max_new_tokens": length, "ignore_eos": True} for length in lengths]
    return {"input_ids": prompts, "sampling_params": sampling} | more
