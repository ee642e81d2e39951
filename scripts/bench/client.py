"""SGLang's own benchmark of servers, `python -m sglang.bench_serving`: what it is asked to do, and what it found."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.engine import Load, Workload
from bench.prompts import Prompts, read_dataset, serving_format

# The names of its figures, by those in `METRICS`.
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


def bench_serving(url: str, workload: Workload, load: Load, is_dummy: bool, env: dict[str, str]) -> dict:
    """One run against the server at `url`.

    Args:
        workload, load: what is asked.
        is_dummy: whether ends of answers mean nothing.
        env: of the process.

    Returns:
        Figures by their names in `METRICS`.

    Raises:
        RuntimeError: it failed, or any request did.
    """
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as folder:
        out = Path(folder, "result.jsonl")
        flags = ["--base-url", url, *client_flags(workload, load, is_dummy, Path(folder)), "--output-file", str(out)]
        no_proxy = ",".join(filter(None, [env.get("NO_PROXY"), "127.0.0.1"]))
        run = subprocess.run(
            [sys.executable, "-m", "sglang.bench_serving", *flags],
            env=env | {"NO_PROXY": no_proxy},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if run.returncode or not out.exists():
            raise RuntimeError(f"bench_serving ended with status {run.returncode}:\n{run.stdout[-3000:]}")
        return figures(json.loads(out.read_text()), workload.num_requests(load.concurrency))


def client_flags(workload: Workload, load: Load, is_dummy: bool, folder: Path) -> list[str]:
    """Flags for all but where the server is; files that they name are written to `folder`."""
    serving, prompts = workload.serving, workload.prompts[load.prompts]
    count = workload.num_requests(load.concurrency)
    flags = ["--backend", serving.api, *dataset_flags(workload, prompts, count, folder)]
    flags += ["--num-prompts", str(count), "--max-concurrency", str(load.concurrency)]
    if load.request_rate is not None:
        flags += ["--request-rate", str(load.request_rate)]
    # Emptying the cache after the warm-up also makes the server count its acceptance length anew.
    flags += ["--warmup-requests", str(load.concurrency), "--flush-cache", "--seed", "1"]
    body = {}
    # Answers to what nobody wrote end anywhere.
    if not is_dummy and prompts.dataset is not None:
        flags.append("--disable-ignore-eos")
        if serving.api == "sglang-oai-chat":
            # Without it answers count as long as they may be.
            body["stream_options"] = {"include_usage": True}
    if workload.chat_arguments:
        body["chat_template_kwargs"] = workload.chat_arguments
    if body:
        flags += ["--extra-request-body", json.dumps(body)]
    return [*flags, "--disable-tqdm", "--output-details"]


def dataset_flags(workload: Workload, prompts: Prompts, count: int, folder: Path) -> list[str]:
    """What is asked, `count` times; questions that bench_serving does not read are written in ShareGPT's format."""
    serving, new_tokens = workload.serving, str(workload.new_tokens)
    if prompts.tokens is None:
        lengths = ["--sharegpt-context-len", str(serving.context_tokens)]
        if not serving.own_lengths:
            lengths += ["--sharegpt-output-len", new_tokens]
    else:
        # The ratio makes all of them that long. Token ids, as text may take another number of them.
        lengths = ["--random-input-len", str(prompts.tokens), "--random-output-len", new_tokens]
        lengths += ["--random-range-ratio", "1"]
        if serving.api == "sglang":
            lengths.append("--tokenize-prompt")
    if prompts.dataset is None:
        return ["--dataset-name", "random-ids", *lengths]
    name, path = serving_format(prompts.dataset), prompts.dataset
    if name is None:
        name, path = "sharegpt", str(folder / "sharegpt.json")
        questions = itertools.cycle(question.text for question in read_dataset(prompts.dataset))
        write_sharegpt(Path(path), list(itertools.islice(questions, count)))
    if prompts.tokens is not None:
        # Its prompts are a ShareGPT file's, cut or repeated.
        name = "random"
    return ["--dataset-name", name, "--dataset-path", os.path.abspath(path), *lengths]


def write_sharegpt(path: Path, questions: list[str]) -> None:
    """Conversations of a question and an empty answer."""
    conversations = [
        {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": ""}]}
        for question in questions
    ]
    path.write_text(json.dumps(conversations))


def figures(result: dict, count: int) -> dict:
    """The figures that are kept of a run's line in `--output-file`.

    Raises:
        RuntimeError: not all of `count` requests were answered.
    """
    if len(result["errors"]) < count:
        raise RuntimeError(
            f"the dataset has {len(result['errors'])} requests of up to --context-tokens, and {count} were to be "
            "asked; there may be fewer --requests."
        )
    failed = [error for error in result["errors"] if error]
    if failed or result["completed"] != count:
        raise RuntimeError(f"{result['completed']} of {count} requests were answered; {(failed or ['?'])[0][-1000:]}")
    return {name: result[figure] for name, figure in _FIGURES.items() if result[figure] is not None}
