"""Real servers of the tiny pair, `python -m sglang.launch_server` in float32, and requests to them.

They run on a GPU if there is one, else on the CPU.
"""

from __future__ import annotations

import atexit
import copy
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import requests
import torch
from bench.ports import claim_port
from sglang.srt.sampling.sampling_params import SamplingParams
from support import plugins, processes

from models.tiny import DRAFTER_DIR, TARGET_DIR

START_SECONDS = 240
REQUEST_SECONDS = 240

# Flags that depend on the device. On a GPU too, tests compare every token, so nothing may round float32.
if torch.cuda.is_available():
    DEVICE_FLAGS = {
        "device": "cuda",
        "attention-backend": "triton",
        # On CUDA, SGLang's norms take float32 only in this mode.
        "enable-deterministic-inference": True,
        # A limit on free memory, which servers of other tests share. `max-total-tokens` sets the size of the pools.
        "mem-fraction-static": 0.5,
        # Tests have batches of up to 16 requests. Some are replayed, and larger ones run without a graph.
        "cuda-graph-max-bs-decode": 8,
        "disable-prefill-cuda-graph": True,
    }
    DEVICE_ENV = {
        # Otherwise Triton multiplies float32 in TF32.
        "TRITON_F32_DEFAULT": "ieee",
        # Deterministic inference would cut prompts at multiples of 4096, and never admit one that is longer than a
        # smaller chunk.
        "SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE": "1",
    }
else:
    DEVICE_FLAGS = {"device": "cpu", "attention-backend": "torch_native"}
    DEVICE_ENV = {
        "SGLANG_USE_CPU_ENGINE": "1",
        # SGLang's compiled code takes longer to compile than to run here, and needs a C++ compiler.
        "TORCH_COMPILE_DISABLE": "1",
    }
# Three variables enable SGLang's own checks of its pools, after every step and when it is idle. A slot that leaks, is
# freed twice, or is used after it was freed ends the server. Triton's interpreter must be off unless a test asks for
# it; tests of kernels may have set its variable in this process.
ENV = DEVICE_ENV | {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TRITON_INTERPRET": "0",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    # A server may close an idle connection just when the next request comes, which would fail the test.
    "SGLANG_TIMEOUT_KEEP_ALIVE": "600",
}
FLAGS = DEVICE_FLAGS | {
    "model-path": str(TARGET_DIR),
    "dtype": "float32",
    "max-total-tokens": 20000,
    "max-running-requests": 16,
    # An idle scheduler would keep a core busy.
    "sleep-on-idle": True,
}
DFLASH_FLAGS = {"speculative-algorithm": "DFLASH", "speculative-draft-model-path": str(DRAFTER_DIR)}

SAMPLING_PARAMS = {field.name for field in msgspec.structs.fields(SamplingParams)}


@dataclass(frozen=True)
class Settings:
    """Settings of servers in addition to the pair. Hashable: tests with the same settings share servers.

    Attributes:
        name: for the tests' ids.
        flags: of `launch_server`, without dashes. True stands for a flag without a value, a tuple for several values,
            None for a flag to leave out.
        dflash_flags: flags of the server with speculation only.
        plain_flags: flags of the server without speculation only.
        env: environment variables.
        plain: settings of the server without speculation, if they differ. Its text does not depend on the layout of its
            KV and steps, so all layouts are compared with one server.
        trained: block size of the drafter.
    """

    name: str
    flags: tuple[tuple[str, Any], ...] = ()
    dflash_flags: tuple[tuple[str, Any], ...] = ()
    plain_flags: tuple[tuple[str, Any], ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    plain: Settings | None = None
    trained: int = 16

    def __str__(self) -> str:
        return self.name

    @property
    def block_size(self) -> int:
        """Return W of the drafter's forward."""
        asked = dict(self.dflash_flags).get("speculative-dflash-block-size", self.trained)
        return asked if self.num_nodes is None else min(asked, self.num_nodes)

    @property
    def num_nodes(self) -> int | None:
        """Return the nodes of a tree; None if chains are verified."""
        flags = dict(self.dflash_flags)
        if flags.get("speculative-eagle-topk", 1) == 1:
            return None
        return flags.get("speculative-num-draft-tokens", flags.get("speculative-dflash-block-size", self.trained))

    @property
    def num_rows(self) -> int:
        """Return the tokens of a request that the target verifies per cycle."""
        return self.num_nodes or self.block_size

    @property
    def cycles(self) -> dict[str, int]:
        """Return the arguments of the oracle for these cycles."""
        sizes = {"block_size": self.block_size}
        if self.num_nodes is not None:
            sizes["num_nodes"] = self.num_nodes
            sizes["num_candidates"] = dict(self.dflash_flags)["speculative-eagle-topk"]
        return sizes

    def arguments(self, dflash: bool) -> tuple[str, ...]:
        """Return the arguments of `launch_server`."""
        flags = FLAGS | dict(self.flags)
        flags |= DFLASH_FLAGS | dict(self.dflash_flags) if dflash else dict(self.plain_flags)
        parts = []
        for flag, value in flags.items():
            if value is not None:
                values = () if value is True else value if isinstance(value, tuple) else (value,)
                parts += [f"--{flag}", *map(str, values)]
        return tuple(parts)


SYNC = ("disable-overlap-schedule", True)
DEFAULT = Settings("default")
# Without speculation and with overlap scheduling, SGLang's penalties, and what custom logit processors get, are one
# token late.
PLAIN_SYNC = Settings("sync", plain_flags=(SYNC,))

TREES_ON_A_GPU = "servers of float32 on a GPU are deterministic ones, which verify no trees; see tests/gpu"


def trees(num_candidates: int, num_nodes: int | None = None) -> tuple[tuple[str, int], ...]:
    """Return flags of a server with DFLASH that verifies trees, by default with as many nodes as a block has tokens."""
    flags = (("speculative-eagle-topk", num_candidates),)
    return flags if num_nodes is None else (*flags, ("speculative-num-draft-tokens", num_nodes))


# Requests are admitted as if they ended at once, into a pool that cannot hold them until they end. Whether it becomes
# full depends on when they arrive, so SGLang also retracts one every few steps.
SMALL_POOL = (("max-total-tokens", 640), ("schedule-conservativeness", 0.05), ("max-running-requests", 8))
RETRACT = (("SGLANG_TEST_RETRACT", "1"), ("SGLANG_TEST_RETRACT_INTERVAL", "11"))
# With more ranks than NUMA nodes, SGLang must be told the cores of each rank.
_CORES = sorted(os.sched_getaffinity(0))
TWO_CORES = (("SGLANG_CPU_OMP_THREADS_BIND", f"{_CORES[0]}|{_CORES[-1]}"),)
# Flags that requests of some kinds need.
_REQUEST_FLAGS = (
    ("enable-custom-logit-processor", True),
    ("enable-return-hidden-states", True),
    ("enable-priority-scheduling", True),
    ("tool-call-parser", "qwen25"),
    ("reasoning-parser", "qwen3"),
)
REQUESTS = Settings("requests", flags=_REQUEST_FLAGS, plain_flags=(SYNC,))
REQUESTS_SYNC = Settings(
    "requests-sync", flags=_REQUEST_FLAGS, dflash_flags=(SYNC, ("enable-metrics", True)), plain_flags=(SYNC,)
)
REQUESTS_TREES = Settings("requests-trees", flags=_REQUEST_FLAGS, dflash_flags=trees(8), plain_flags=(SYNC,))
_PAGED_FLAGS = (("page-size", 16), ("chunked-prefill-size", 64))
PAGED = Settings("page16-chunk64", flags=_PAGED_FLAGS, plain=DEFAULT)
# A path may be in any of a tree's pages.
TREES_PAGED = Settings(
    "page16-chunk64-trees32",
    flags=_PAGED_FLAGS,
    dflash_flags=(SYNC, *trees(8, 32), ("enable-metrics", True)),
    plain=DEFAULT,
)
# With a reasoning parser, SGLang fails to compile any grammar of llguidance.
LLGUIDANCE = Settings("llguidance", flags=(("grammar-backend", "llguidance"),), plain_flags=(SYNC,))


class ServerError(AssertionError):
    """Error: the server died, did not start or refused a request. It ends with the tail of the log."""


class Server:
    """One server on a free loopback port. `stop` ends every process that it started, and so does Python's exit.

    Args:
        settings: of the server.
        dflash: whether it speculates.
        log_path: of its log.
        answers: cache of `generate`'s answers by request, shared by servers of the same settings. Repeatable requests
            are sent once. None disables the cache.
    """

    def __init__(
        self, settings: Settings, dflash: bool, log_path: Path, answers: dict[str, dict] | None = None
    ) -> None:
        self.settings = settings
        self.dflash = dflash
        self.log_path = log_path
        self._answers = answers
        port, self._port_claim = claim_port()
        ports = ["--port", str(port)]
        # SGLang would choose its second port long before it listens there, and another process could take it. Replicas
        # need one each, so they choose.
        if "dp-size" not in dict(settings.flags):
            ports += ["--nccl-port", str(port + 1)]
        self._url = f"http://127.0.0.1:{port}"
        self._http = requests.Session()
        self._http.trust_env = False
        self._http.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=64))
        key = dict((*settings.flags, *settings.dflash_flags)).get("admin-api-key")
        if key is not None:
            self._http.headers["Authorization"] = f"Bearer {key}"
        arguments = ["-m", "sglang.launch_server", *settings.arguments(dflash), "--host", "127.0.0.1", *ports]
        # With default flags, the server with DFLASH is started as users start theirs.
        self.is_spawned = dflash and not (settings.flags or settings.dflash_flags or settings.env)
        self._process = processes.start(arguments, ENV | dict(settings.env), log_path, spawn=self.is_spawned)
        atexit.register(self.stop)

    def wait_until_healthy(self) -> None:
        """Wait for `/health`."""
        deadline = time.monotonic() + START_SECONDS
        while not self._is_healthy():
            if not self.is_running():
                raise ServerError(f"the server has ended\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ServerError(f"the server is not ready after {START_SECONDS} s\n{self.log_tail()}")
            time.sleep(0.2)

    def wait_until_ready(self) -> None:
        """Wait for `/health`, then check which worker serves: ours if DFLASH was asked for, else none."""
        self.wait_until_healthy()
        described = self.internal_state().get("sglang_dflash")
        if self.dflash:
            assert described is not None, f"SGLang's own worker serves DFLASH\n{self.log_tail()}"
            assert described["worker"] == "DFlashWorker"
            assert described["block_size"] == self.settings.block_size
            assert described["verified_rows"] == self.settings.num_rows
        else:
            assert described is None
        # Remove what the warm-up request left.
        self.flush_cache()

    def _is_healthy(self) -> bool:
        try:
            return self._http.get(f"{self._url}/health", timeout=5).status_code == 200
        except requests.RequestException:
            return False

    @property
    def url(self) -> str:
        return self._url

    def is_running(self) -> bool:
        return self._process.is_running()

    def stop(self) -> None:
        """End the server and every process that it started."""
        atexit.unregister(self.stop)
        self._http.close()
        self._process.end()
        self._port_claim.close()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = 60) -> str:
        return "\n".join([f"--- {self.log_path}", *self.log().splitlines()[-lines:]])

    # --- HTTP -------------------------------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        return self._answer(self._request("GET", path))

    def post(self, path: str, body: dict | None = None) -> Any:
        return self._answer(self._request("POST", path, json=body))

    def try_post(self, path: str, body: dict) -> requests.Response:
        """Post a request that may be refused."""
        return self._request("POST", path, json=body)

    def attach_storage(self, backend: str) -> None:
        """Attach a storage backend to the hierarchical cache."""
        self._check(self._request("PUT", "/hicache/storage-backend", json={"hicache_storage_backend": backend}))

    def detach_storage(self) -> None:
        self._check(self._request("DELETE", "/hicache/storage-backend"))

    def post_stream(self, path: str, body: dict) -> Iterator[dict]:
        """Yield the chunks of a server-sent event stream as they come. Closing the iterator disconnects."""
        # A new connection, which is closed with the iterator.
        with requests.Session() as http:
            http.trust_env = False
            response = http.post(f"{self._url}{path}", json=body, stream=True, timeout=REQUEST_SECONDS)
            with closing(response):
                self._check(response)
                for line in response.iter_lines(chunk_size=1):
                    if line.startswith(b"data: ") and line != b"data: [DONE]":
                        yield json.loads(line.removeprefix(b"data: "))

    def _request(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        try:
            return self._http.request(method, f"{self._url}{path}", timeout=REQUEST_SECONDS, **kwargs)
        except requests.RequestException as error:
            raise ServerError(f"{method} {path}: {error}\n{self.log_tail()}") from error

    def _check(self, response: requests.Response) -> None:
        if response.status_code != 200:
            raise ServerError(f"{response.url}: {response.status_code} {response.text}\n{self.log_tail()}")

    def _answer(self, response: requests.Response) -> Any:
        self._check(response)
        return response.json() if "json" in response.headers.get("content-type", "") else response.text

    # --- SGLang's API -----------------------------------------------------------------------------------------------

    def generate(self, input_ids: list, **options: Any) -> Any:
        """Call `/generate` greedily: one answer for a prompt, a list for a list of prompts (or for n > 1).

        Options are fields of the request or of its `sampling_params`.
        """
        if self._answers is None or not is_repeatable(options):
            return self.post("/generate", generate_body(input_ids, options))
        prompts = input_ids if isinstance(input_ids[0], list) else [input_ids]
        keys = [json.dumps(generate_body(prompt, options), sort_keys=True) for prompt in prompts]
        unknown = [i for i, key in enumerate(keys) if key not in self._answers]
        if unknown:
            answers = self.post("/generate", generate_body([prompts[i] for i in unknown], options))
            self._answers |= {keys[i]: answer for i, answer in zip(unknown, answers)}
        answers = [copy.deepcopy(self._answers[key]) for key in keys]
        return answers if prompts is input_ids else answers[0]

    def generate_concurrently(self, requests_: list[dict]) -> list[dict]:
        """Send many requests at a time, one connection each. Take arguments of `generate`, return answers in order."""
        with ThreadPoolExecutor(min(len(requests_), 64)) as threads:
            return list(threads.map(lambda request: self.generate(**request), requests_))

    def stream(self, input_ids: list[int], **options: Any) -> Iterator[dict]:
        """Call `/generate` greedily with `stream`. Every chunk holds the whole answer so far."""
        return self.post_stream("/generate", generate_body(input_ids, options) | {"stream": True})

    def internal_state(self) -> dict:
        return self.get("/server_info")["internal_states"][0]

    def loads(self) -> list[dict]:
        """Return the load of every replica."""
        return self.get("/v1/loads")["loads"]

    def flush_cache(self) -> None:
        """Empty the radix cache after all requests have ended. Fail if one runs on for 30 s."""
        self.post("/flush_cache?timeout=30")

    def wait_until_empty(self) -> None:
        """Wait until `/v1/loads`, which SGLang updates now and then, shows no request and no KV slot in use."""
        counters = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
        deadline = time.monotonic() + 15
        while any(used := [load[counter] for load in self.loads() for counter in counters]):
            assert time.monotonic() < deadline, f"{counters}: {used} in an idle server"
            time.sleep(0.1)


def with_plugin(*names: str) -> tuple[tuple[str, str], ...]:
    """Return the environment in which SGLang loads plugins of `tests/plugins`."""
    return (("PYTHONPATH", plugins.python_path(*names)),)


def is_repeatable(options: dict[str, Any]) -> bool:
    """Return whether `generate` gets the same answer each time: not sampled without a seed, not a session's turn."""
    is_drawn = options.get("temperature", 0) > 0 and "sampling_seed" not in options
    return not is_drawn and "n" not in options and "session_params" not in options


def generate_body(input_ids: list, options: dict[str, Any]) -> dict[str, Any]:
    sampling_params = {name: options[name] for name in SAMPLING_PARAMS if name in options}
    fields = {name: value for name, value in options.items() if name not in SAMPLING_PARAMS}
    return {"input_ids": input_ids, "sampling_params": {"temperature": 0} | sampling_params} | fields


@dataclass(frozen=True)
class Pair:
    """Two servers of the same settings, with DFLASH and without."""

    dflash: Server
    plain: Server

    def ask(self, call: Callable[[Server], Any]) -> tuple[Any, Any]:
        """Call both servers at the same time, and return both results."""
        with ThreadPoolExecutor(2) as threads:
            return tuple(threads.map(call, (self.dflash, self.plain)))

    def lossless(self, call: Callable[[Server], Any]) -> Any:
        """Return DFLASH's answers to a call, after checking that they equal those without speculation."""
        dflash, plain = self.ask(call)
        assert_same_answers(dflash, plain)
        return dflash


def assert_same_answers(dflash: Any, plain: Any) -> None:
    """Check that tokens, text and finish reason of one answer, or of every answer of a list, are equal."""
    if isinstance(plain, dict):
        dflash, plain = [dflash], [plain]
    assert len(dflash) == len(plain) > 0
    for index, (mine, expected) in enumerate(zip(dflash, plain)):
        tokens, expected_tokens = mine["output_ids"], expected["output_ids"]
        same = next((i for i, (a, b) in enumerate(zip(tokens, expected_tokens)) if a != b), None)
        assert tokens == expected_tokens, f"answer {index} of {len(plain)} differs from token {same}"
        assert mine.get("text") == expected.get("text")
        assert mine["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]


class ServerKeeper:
    """Servers that are started on demand. A few are kept: first those that start slowly, then those used last."""

    CAPACITY = 4

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._servers: dict[tuple, Server] = {}
        self._plain_answers: dict[tuple, dict[str, dict]] = {}
        self._started = 0

    @property
    def servers(self) -> list[Server]:
        return list(self._servers.values())

    def pair(self, settings: Settings) -> Pair:
        return Pair(*self._get([(settings, True), (settings.plain or settings, False)]))

    def server(self, settings: Settings, dflash: bool) -> Server:
        return self._get([(settings, dflash)])[0]

    def together(self, *settings: Settings) -> list[Server]:
        """Return servers with DFLASH that start at the same time, at most CAPACITY."""
        return self._get([(each, True) for each in settings])

    def stop(self) -> None:
        for key in list(self._servers):
            self._servers.pop(key).stop()

    def _get(self, wanted: list[tuple[Settings, bool]]) -> list[Server]:
        # Servers without speculation do not depend on DFLASH's flags.
        keys = [(settings.arguments(dflash), settings.env) for settings, dflash in wanted]
        # A server that a test has brought down must not fail the next tests too.
        self._servers = {key: server for key, server in self._servers.items() if server.is_running()}
        spare = [key for key in self._servers if key not in keys]
        spare.sort(key=lambda key: self._servers[key].is_spawned)
        missing = [key for key in keys if key not in self._servers]
        while spare and len(self._servers) + len(missing) > self.CAPACITY:
            self._servers.pop(spare.pop(0)).stop()
        for key, (settings, dflash) in zip(keys, wanted):
            if key in missing:
                self._started += 1
                name = f"{self._started:02d}-{settings}-{'dflash' if dflash else 'plain'}.log"
                answers = None if dflash else self._plain_answers.setdefault(key, {})
                self._servers[key] = Server(settings, dflash, self._log_dir / name, answers)
        for key in missing:
            try:
                self._servers[key].wait_until_ready()
            except BaseException:
                # Otherwise the next test would use a server that never started.
                for started in missing:
                    self._servers.pop(started).stop()
                raise
        for key in keys:
            self._servers[key] = self._servers.pop(key)
        return [self._servers[key] for key in keys]
