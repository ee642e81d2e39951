"""Runs of SGLang's own benchmark of servers, `python -m sglang.bench_serving`."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from bench.prompts import Prompts, read_dataset, serving_format
from bench.workload import Load, Workload

# `--backend` for vLLM by that for SGLang.
_VLLM_APIS = {"sglang": "vllm", "sglang-oai-chat": "vllm-chat"}
# Printed after each run.
_DONE = "BENCH SERVING DONE"
# Names in `METRICS` and in the output of bench_serving.
_FIGURES = {
    "requests_per_s": "request_throughput",
    "tokens_per_s": "output_throughput",
    "ttft_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "tpot_ms": "median_tpot_ms",
    "itl_ms": "median_itl_ms",
    "itl_p99_ms": "p99_itl_ms",
    # None without speculation.
    "accept_length": "accept_length",
}


class BenchServing:
    """A process that runs bench_serving once per call. It imports SGLang only once. It starts at once.

    Args:
        env: environment of the process.
    """

    def __init__(self, env: dict[str, str]) -> None:
        no_proxy = ",".join(filter(None, [env.get("NO_PROXY"), "127.0.0.1"]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.client"],
            env=env | {"NO_PROXY": no_proxy},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, url: str, workload: Workload, load: Load, mode: str, is_dummy: bool) -> dict:
        """Run bench_serving against a server.

        Args:
            url: of the server.
            workload, load: the requests to send.
            mode: of the server, one of `MODES`.
            is_dummy: weights are dummies, so end-of-sequence tokens have no meaning.

        Returns:
            Figures by their names in `METRICS`.

        Raises:
            RuntimeError: bench_serving or one of its requests failed.
        """
        with tempfile.TemporaryDirectory(prefix="bench-serving-") as folder:
            out = Path(folder, "result.jsonl")
            flags = client_flags(workload, load, mode, is_dummy, Path(folder))
            self._run(["--base-url", url, *flags, "--output-file", str(out)])
            return figures(json.loads(out.read_text()), workload.num_requests(load.concurrency, mode))

    def _run(self, flags: list[str]) -> None:
        # A process that has ended is noticed below.
        with suppress(BrokenPipeError):
            print(json.dumps(flags), file=self._process.stdin, flush=True)
        printed = []
        for line in self._process.stdout:
            if line.strip() == _DONE:
                return
            printed.append(line)
        raise RuntimeError(f"bench_serving ended with status {self._process.wait()}:\n{''.join(printed)[-3000:]}")

    def stop(self) -> None:
        """End the process in any state."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def serve() -> None:
    """Run bench_serving with the flags of each line of stdin, a JSON list."""
    from sglang.bench_serving import cli_main

    for line in sys.stdin:
        sys.argv = ["bench_serving", *json.loads(line)]
        cli_main()
        print(f"\n{_DONE}", flush=True)


def client_flags(workload: Workload, load: Load, mode: str, is_dummy: bool, folder: Path) -> list[str]:
    """Return all flags but the server's address. Files that flags name are written to `folder`."""
    serving, prompts = workload.serving, workload.prompts[load.prompts]
    count = workload.num_requests(load.concurrency, mode)
    api = _VLLM_APIS[serving.api] if mode == "vllm" else serving.api
    flags = ["--backend", api, *dataset_flags(workload, prompts, count, folder, api)]
    flags += ["--num-prompts", str(count), "--max-concurrency", str(load.concurrency)]
    if load.request_rate is not None:
        flags += ["--request-rate", str(load.request_rate)]
    # Flushing the cache after the warm-up also resets the acceptance length that the server reports.
    flags += ["--warmup-requests", str(load.concurrency), "--flush-cache", "--seed", "1"]
    body = {}
    # Answers to random tokens may end anywhere, so only those to text may end early.
    if not is_dummy and prompts.dataset is not None:
        flags.append("--disable-ignore-eos")
        if serving.api == "sglang-oai-chat":
            # Without it bench_serving counts the longest allowed length for each answer.
            body["stream_options"] = {"include_usage": True}
    if workload.chat_arguments:
        body["chat_template_kwargs"] = workload.chat_arguments
    if body:
        flags += ["--extra-request-body", json.dumps(body)]
    return [*flags, "--disable-tqdm", "--output-details"]


def dataset_flags(workload: Workload, prompts: Prompts, count: int, folder: Path, api: str) -> list[str]:
    """Return the flags that choose `count` prompts for this `--backend`.

    Questions that bench_serving cannot read are written in ShareGPT's format.
    """
    serving, new_tokens = workload.serving, str(workload.new_tokens)
    if prompts.tokens is None:
        lengths = ["--sharegpt-context-len", str(serving.context_tokens)]
        if not serving.own_lengths:
            lengths += ["--sharegpt-output-len", new_tokens]
    else:
        # A ratio of 1 fixes the lengths.
        lengths = ["--random-input-len", str(prompts.tokens), "--random-output-len", new_tokens]
        lengths += ["--random-range-ratio", "1"]
        # Token ids are sent because text may be tokenised to another length. Other APIs get text.
        if api == "sglang":
            lengths.append("--tokenize-prompt")
    if prompts.dataset is None:
        return ["--dataset-name", "random-ids", *lengths]
    name, path = serving_format(prompts.dataset), prompts.dataset
    if name is None:
        name, path = "sharegpt", str(folder / "sharegpt.json")
        questions = itertools.cycle(question.text for question in read_dataset(prompts.dataset))
        write_sharegpt(Path(path), list(itertools.islice(questions, count)))
    if prompts.tokens is not None:
        # The dataset "random" takes prompts of a ShareGPT file and cuts or repeats them.
        name = "random"
    return ["--dataset-name", name, "--dataset-path", os.path.abspath(path), *lengths]


def write_sharegpt(path: Path, questions: list[str]) -> None:
    """Write conversations of a question and an empty answer."""
    conversations = [
        {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": ""}]}
        for question in questions
    ]
    path.write_text(json.dumps(conversations))


def figures(result: dict, count: int) -> dict:
    """Return the figures to keep of one line of `--output-file`.

    Raises:
        RuntimeError: fewer than `count` requests were answered.
    """
    if len(result["errors"]) < count:
        raise RuntimeError(
            f"the dataset has {len(result['errors'])} requests of up to --context-tokens, and {count} were to be "
            "asked: set fewer --requests or more --context-tokens."
        )
    failed = [error for error in result["errors"] if error]
    if failed or result["completed"] != count:
        raise RuntimeError(f"{result['completed']} of {count} requests were answered; {(failed or ['?'])[0][-1000:]}")
    return {name: result[figure] for name, figure in _FIGURES.items() if result[figure] is not None}


if __name__ == "__main__":
    serve()
