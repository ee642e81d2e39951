"""Measurement of one configuration by an `sglang.Engine` in its own process, which obeys commands.

It uses the Engine instead of the HTTP server (server.py): the Engine starts faster, and HTTP is the same in all modes.
Requests and answers are token ids, so tokenizers take no part.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from safetensors import safe_open

from bench.pairs import NORMAL_DRAFTERS, STATE_SLOTS
from bench.ports import claim_port
from bench.prompts import Prompt, Prompts, build_prompts, final_number
from bench.workload import SHORT_TOKENS, Configuration, Load, Workload

# Arguments that a sweep sets.
OWN_ARGUMENTS = (
    "model_path",
    "device",
    "attention_backend",
    "tp_size",
    "max_total_tokens",
    "skip_tokenizer_init",
    "host",
    "port",
    "nccl_port",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_load_format",
    "speculative_adaptive",
    "speculative_adaptive_config",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_dflash_block_size",
    "speculative_draft_window_size",
)

# As in `sglang_dflash.engine.simulate`, which this process does not import.
RECORDED_DRAFTS = "SGLANG_DFLASH_RECORDED_DRAFTS"
# Candidates per position of a tree.
_CANDIDATES = 16


def environment(
    mode: str,
    device: str = "cuda",
    tp: int = 1,
    accept_length: float | None = None,
    recorded_drafts: str | None = None,
) -> dict[str, str]:
    """Return the environment of a process that serves `mode`. The in-tree mode loads no plugin.

    In place of recorded drafts the in-tree worker gets the length that chains of them commit.
    """
    env = dict(os.environ)
    scripts = str(Path(__file__).resolve().parents[1])
    env["PYTHONPATH"] = f"{scripts}{os.pathsep}{env['PYTHONPATH']}" if "PYTHONPATH" in env else scripts
    # Acceptance is simulated only if asked for here, not by the caller's environment.
    env.pop("SGLANG_SIMULATE_ACC_LEN", None)
    env.pop(RECORDED_DRAFTS, None)
    if recorded_drafts is not None and mode == "ours":
        env[RECORDED_DRAFTS] = recorded_drafts
    if mode == "in-tree":
        accept_length = chain_length(accept_length, recorded_drafts)
    if mode != "none" and accept_length is not None:
        env["SGLANG_SIMULATE_ACC_LEN"] = str(accept_length)
    if mode == "in-tree":
        env["SGLANG_PLUGINS"] = "none"
    if device == "cpu":
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
        if tp > 1:
            cores = sorted(os.sched_getaffinity(0))
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(tp))
    return env


def chain_length(accept_length: float | None, recorded_drafts: str | None) -> float | None:
    """Return the acceptance length that a peer simulates: that of chains of recorded drafts, if there are any."""
    if recorded_drafts is None:
        return accept_length
    with safe_open(recorded_drafts, "pt") as records:
        return float(records.metadata()["tokens_per_cycle"])


def engine_arguments(
    configuration: Configuration, workload: Workload, paths: dict[str, str], device: str, is_dummy: bool
) -> dict:
    """Return arguments of `sglang.Engine`, which are also flags of a server. `paths` has the checkpoints by name."""
    serving = workload.serving
    arguments = {
        "model_path": paths[configuration.target],
        "load_format": "dummy" if is_dummy else "auto",
        "skip_tokenizer_init": serving is None,
        "device": device,
        "dtype": "float32" if device == "cpu" else "bfloat16",
        "attention_backend": configuration.backend,
        "tp_size": configuration.tp,
        # "decode" does not measure prefill: the warm-up leaves the prompts in the radix cache. "serving" empties the
        # cache before each run.
        "disable_radix_cache": workload.measure == "requests",
        "max_running_requests": max(64, *workload.concurrency),
        # Capture takes a while.
        "disable_prefill_cuda_graph": True,
        # A limit on free memory, which other engines share. `max_total_tokens` sets the size of the pools.
        "mem_fraction_static": 0.95,
        # An engine that waits for its turn must not keep a core busy.
        "sleep_on_idle": True,
        "random_seed": 1,
        "log_level": "warning",
    }
    if configuration.target in STATE_SLOTS:
        # By default SGLang gives states about half of the memory.
        running = max(workload.concurrency)
        slots = STATE_SLOTS[configuration.target] * running
        arguments |= {"max_running_requests": running, "max_mamba_cache_size": slots}
    if serving is None:
        arguments["cuda_graph_bs_decode"] = workload.concurrency
    else:
        # Batches have every size, because requests start and end at different times.
        arguments["cuda_graph_max_bs_decode"] = max(workload.concurrency)
        # The server updates the acceptance length that bench_serving reports when it logs.
        arguments["decode_log_interval"] = 10
    if configuration.mode != "none":
        arguments |= drafter_arguments(configuration, paths)
        arguments["speculative_adaptive"] = configuration.adaptive
        if configuration.mode == "ours":
            if not configuration.adaptive:
                arguments["speculative_adaptive_config"] = "fixed"
            arguments["speculative_eagle_topk"] = 1 if configuration.nodes is None else _CANDIDATES
        if configuration.nodes is not None:
            arguments["speculative_num_draft_tokens"] = configuration.nodes
        if configuration.block_size is not None:
            arguments["speculative_dflash_block_size"] = configuration.block_size
        if configuration.draft_window is not None:
            arguments["speculative_draft_window_size"] = configuration.draft_window
    return arguments | given_arguments(configuration, workload)


def given_arguments(configuration: Configuration, workload: Workload) -> dict:
    """Return `workload.engine_arguments`, of which an engine without speculation gets none of speculation."""
    is_plain = configuration.mode == "none"
    given = workload.engine_arguments.items()
    return {name: value for name, value in given if not (is_plain and name.startswith("speculative_"))}


def drafter_arguments(configuration: Configuration, paths: dict[str, str]) -> dict:
    """Return the arguments that no server with DFLASH can do without."""
    arguments = {
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": paths[configuration.drafter],
    }
    if configuration.drafter in NORMAL_DRAFTERS:
        arguments["speculative_draft_load_format"] = "auto"
    return arguments


def check_server(info: dict, mode: str, tokens: int) -> None:
    """Check that the mode's worker serves, and that the KV pool has enough tokens.

    Only this package's worker describes itself in `/server_info`.

    Raises:
        RuntimeError: another worker serves, or the pool is too small.
    """
    served_by = info["internal_states"][0].get("sglang_dflash")
    if (served_by is not None) != (mode == "ours"):
        raise RuntimeError(f"mode {mode} is served by {served_by or 'another worker'}")
    pool = info["max_total_num_tokens"]
    # The pool has whole pages, so it may be slightly smaller.
    if pool < 0.99 * tokens:
        raise RuntimeError(f"the KV pool has {pool} of {tokens} tokens: run fewer engines at a time (--together).")


# --- in the engine's process ----------------------------------------------------------------------------------------


def serve(job: dict) -> None:
    """Start the engine and print READY. Then execute the commands on stdin, one per line: a name and its arguments."""
    import sglang
    from transformers import AutoTokenizer

    configuration = Configuration(**job["configuration"])
    workload = Workload(**job["workload"] | {"prompts": [Prompts(**prompts) for prompts in job["workload"]["prompts"]]})
    target = job["paths"][configuration.target]
    tokenizer = None if job["is_dummy"] else AutoTokenizer.from_pretrained(target)
    most = max(workload.concurrency)
    sets = [build_prompts(prompts, tokenizer, most, workload.chat_arguments) for prompts in workload.prompts]
    longest = max(len(prompt.input_ids) for prompts in sets for prompt in prompts)
    # In "decode", the radix cache holds the answers of the previous run too.
    answers = 2 if workload.measure == "decode" else 1
    # Engines that are compared share the GPU, so each takes only the KV that it needs.
    max_total_tokens = most * (longest + answers * workload.answer_tokens)
    engine = sglang.Engine(
        **engine_arguments(configuration, workload, job["paths"], job["device"], job["is_dummy"]),
        max_total_tokens=max_total_tokens,
        nccl_port=job["nccl_port"],
    )
    check_server(engine.get_server_info(), configuration.mode, max_total_tokens)

    def warm_up(index: int, concurrency: int, temperature: float) -> None:
        if workload.measure == "requests":
            # The first round loads or compiles kernels for every batch size.
            measure(index, concurrency, temperature)
            return
        # The second batch takes its prompts from the radix cache, which needs other kernels than the first.
        for _ in range(2):
            generate_batch(engine, sets[index], concurrency, SHORT_TOKENS)

    def measure(index: int, concurrency: int, temperature: float) -> dict:
        prompts = sets[index]
        if workload.measure == "decode":
            new_tokens = workload.plain_tokens if configuration.mode == "none" else workload.new_tokens
            return measure_decode(engine, prompts, concurrency, new_tokens)
        asked = [prompts[i % len(prompts)] for i in range(workload.num_requests(concurrency, configuration.mode))]
        sampling = {"temperature": temperature, "max_new_tokens": workload.new_tokens, "ignore_eos": tokenizer is None}
        return measure_requests(engine, tokenizer, asked, concurrency, sampling)

    def trace(index: int, concurrency: int, steps: int, folder: str) -> None:
        engine.start_profile(output_dir=folder, activities=["GPU"], num_steps=steps, with_stack=False)
        generate_batch(engine, sets[index], concurrency, workload.new_tokens)

    commands = {"warm_up": warm_up, "measure": measure, "trace": trace}
    print("READY", flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print("RESULT " + json.dumps(commands[name](*arguments)), flush=True)
    # stdin is closed: the sweep has ended or was killed.
    engine.shutdown()


def generate_batch(engine, prompts: list[Prompt], batch: int, new_tokens: int) -> tuple[float, list[int]]:
    """Return the seconds until all answers are complete, and the number of cycles of each."""
    input_ids = [prompts[i % len(prompts)].input_ids for i in range(batch)]
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    start = time.perf_counter()
    outputs = engine.generate(input_ids=input_ids, sampling_params=sampling)
    seconds = time.perf_counter() - start
    return seconds, [output["meta_info"].get("spec_verify_ct") or new_tokens for output in outputs]


def measure_decode(engine, prompts: list[Prompt], batch: int, new_tokens: int) -> dict:
    """Measure steady decoding: a long answer minus a short one, so that prefill and the last cycles cancel."""
    # The faster of two: a delay in the short run would make decoding look faster.
    short_seconds, short_cycles = min(generate_batch(engine, prompts, batch, SHORT_TOKENS) for _ in range(2))
    seconds, cycles = generate_batch(engine, prompts, batch, SHORT_TOKENS + new_tokens)
    seconds -= short_seconds
    return {
        "tokens_per_s": batch * new_tokens / seconds,
        "tpot_ms": seconds / new_tokens * 1e3,
        # The batch steps until its slowest request has ended.
        "cycle_ms": seconds / (max(cycles) - max(short_cycles)) * 1e3,
        "accept_length": batch * new_tokens / (sum(cycles) - sum(short_cycles)),
    }


@dataclass(frozen=True)
class Answer:
    """One answered request. Times are those of `time.perf_counter`, in seconds.

    Attributes:
        sent, first, last: times of the request, of the first tokens and of the last tokens.
        cycles: decode steps, without the prefill.
        output_ids: tokens of the answer.
    """

    sent: float
    first: float
    last: float
    cycles: int
    output_ids: list[int]

    @property
    def num_decoded(self) -> int:
        """Return the number of tokens after the first, which the prefill gives."""
        return len(self.output_ids) - 1


def measure_requests(engine, tokenizer, prompts: list[Prompt], concurrency: int, sampling: dict) -> dict:
    """Measure clients in a closed loop. Without a tokenizer the weights are dummies, and answers never end early."""
    answers = engine.loop.run_until_complete(ask(engine, prompts, concurrency, sampling))
    result = summarize_answers(answers)
    if any(prompt.answer for prompt in prompts):
        result["accuracy"] = accuracy(prompts, [tokenizer.decode(answer.output_ids) for answer in answers])
    return result


async def ask(engine, prompts: list[Prompt], concurrency: int, sampling: dict) -> list[Answer]:
    """Send all prompts in order, by `concurrency` clients that each wait for an answer before the next prompt."""
    answers: list[Answer | None] = [None] * len(prompts)
    waiting = iter(enumerate(prompts))

    async def client() -> None:
        for index, prompt in waiting:
            sent, times = time.perf_counter(), []
            stream = await engine.async_generate(input_ids=prompt.input_ids, sampling_params=sampling, stream=True)
            async for chunk in stream:
                times.append(time.perf_counter())
                output_ids, meta_info = chunk["output_ids"], chunk["meta_info"]
            cycles = meta_info.get("spec_verify_ct") or len(output_ids) - 1
            answers[index] = Answer(sent, times[0], times[-1], cycles, output_ids)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return answers


def summarize_answers(answers: list[Answer]) -> dict:
    """Return throughput over the run, medians over requests, and cycle times over all decoding, with queueing."""
    decoded = [answer for answer in answers if answer.num_decoded > 0]
    seconds = max(answer.last for answer in answers) - min(answer.sent for answer in answers)
    cycles = sum(answer.cycles for answer in decoded)
    return {
        "tokens_per_s": sum(len(answer.output_ids) for answer in answers) / seconds,
        "ttft_ms": statistics.median(answer.first - answer.sent for answer in answers) * 1e3,
        "tpot_ms": statistics.median((answer.last - answer.first) / answer.num_decoded for answer in decoded) * 1e3,
        "cycle_ms": sum(answer.last - answer.first for answer in decoded) / cycles * 1e3,
        "accept_length": sum(answer.num_decoded for answer in decoded) / cycles,
    }


def accuracy(prompts: list[Prompt], texts: list[str]) -> float:
    """Return the share of correct answers among the prompts whose answer is known."""
    known = [(prompt.answer, final_number(text)) for prompt, text in zip(prompts, texts, strict=True) if prompt.answer]
    return sum(answer == expected for expected, answer in known) / len(known)


# --- in the parent's process ----------------------------------------------------------------------------------------


class EngineProcess:
    """An engine in its own process, with its output in `log`. It starts at once, but may not be ready yet."""

    def __init__(
        self, configuration: Configuration, workload: Workload, paths: dict, device: str, is_dummy: bool, log: TextIO
    ):
        self.configuration = configuration
        port, self._port_claim = claim_port()
        job = {
            "configuration": asdict(configuration),
            "workload": asdict(workload),
            "paths": paths,
            "device": device,
            "is_dummy": is_dummy,
            "nccl_port": port,
        }
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.engine", json.dumps(job)],
            env=environment(
                configuration.mode, device, configuration.tp, workload.accept_length, workload.recorded_drafts
            ),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )

    def _wait_for(self, word: str) -> str:
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        self._log.seek(0)
        raise RuntimeError(f"{self.configuration} failed:\n{self._log.read()[-6000:]}")

    def wait_until_ready(self) -> None:
        self._wait_for("READY")

    def _ask(self, command: str, *arguments) -> dict | None:
        print(json.dumps([command, *arguments]), file=self._process.stdin, flush=True)
        return json.loads(self._wait_for("RESULT "))

    def warm_up(self, load: Load) -> None:
        """Run a short answer per request of the batch; for "requests" run the whole measurement once."""
        self._ask("warm_up", load.prompts, load.concurrency, load.temperature)

    def measure(self, load: Load) -> dict:
        return self._ask("measure", load.prompts, load.concurrency, load.temperature)

    def trace(self, load: Load, steps: int, folder: Path) -> list[dict]:
        """Return the events of rank 0 in the first scheduler steps of a batch.

        PyTorch's profiler writes them to `folder`. Answers must last longer than `steps`.
        """
        self._ask("trace", load.prompts, load.concurrency, steps, str(folder))
        (path,) = folder.glob("*-TP-0.trace.json.gz")
        return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]

    def stop(self) -> None:
        """End the engine and every process that it started, in any state."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._port_claim.close()
        self._log.close()


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
