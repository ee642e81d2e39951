"""Run a server for minutes under many clients and all kinds of requests; report errors, acceptance, memory and pools.

    python3 scripts/soak.py --url http://127.0.0.1:30000 --seconds 600 --clients 64 --prompts chats.json --out work/soak

The server runs this package and has a chat template. Requests are chats, greedy and sampled, with grammars, penalties,
log probabilities, seeds or several answers; some hang up. PROMPTS is a JSON list of texts, or an object of such lists.
OUT.json and OUT.md have a row for every --every seconds. The exit code is 1 if a request fails, if tokens are held
after all requests have ended, or if the server's reports cannot be read.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

import requests
from bench.arguments import positive
from bench.machine import hardware, versions

# Fields of a request. Fields that are left out have SGLang's defaults.
KINDS: dict[str, dict] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.7},
    "filtered": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "all filters": {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "min_p": 0.02},
    "seeded": {"temperature": 0.7, "seed": 7},
    "penalties": {"temperature": 0, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "log probabilities": {"temperature": 0, "logprobs": True, "top_logprobs": 3},
    "grammar": {"temperature": 0, "regex": r"[A-Z][a-z ,]{20,120}\."},
    "schema": {
        "temperature": 0.5,
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "answer",
                "schema": {
                    "type": "object",
                    "properties": {"answer": {"type": "string", "maxLength": 60}, "sure": {"type": "boolean"}},
                    "required": ["answer", "sure"],
                },
            },
        },
    },
    "two answers": {"temperature": 0.8, "n": 2},
    "hangs up": {"temperature": 0, "stream": True},
}
REQUEST_SECONDS = 300
# Time for the server to update its count of held tokens.
_LOADS_SECONDS = 15


@dataclass
class Tally:
    """Counts of all clients, which share it.

    Attributes:
        answered: requests by kind.
        failures: number of each message.
        tokens: tokens of all answers.
    """

    answered: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, tokens: int) -> None:
        with self.lock:
            self.answered[kind] += 1
            self.tokens += tokens

    def fail(self, kind: str, message: str) -> None:
        with self.lock:
            self.failures[f"{kind}: {message[:300]}"] += 1


@dataclass(frozen=True)
class Row:
    """Figures of one interval.

    Attributes:
        seconds: time since the start.
        answered, failed: requests so far.
        tokens_per_s: tokens of answers per second in this interval.
        acceptance_length: committed tokens per cycle and request in this interval.
        held_tokens: tokens of the KV pool in use, with the prefix cache.
        gpu_mib: memory in use on all visible GPUs; None without a GPU.
    """

    seconds: float
    answered: int
    failed: int
    tokens_per_s: float
    acceptance_length: float
    held_tokens: int
    gpu_mib: int | None


class Client:
    """A client that sends one request after another."""

    def __init__(self, url: str, prompts: list[str], new_tokens: int, seed: int, tally: Tally) -> None:
        self._url, self._prompts, self._new_tokens, self._tally = url, prompts, new_tokens, tally
        self._chance = random.Random(seed)
        self._http = requests.Session()
        self._http.trust_env = False

    def run(self, is_over: threading.Event) -> None:
        while not is_over.is_set():
            kind = self._chance.choice(list(KINDS))
            try:
                self._tally.add(kind, self._ask(KINDS[kind]))
            except (requests.RequestException, ValueError, KeyError) as error:
                self._tally.fail(kind, f"{type(error).__name__}: {error}")
                # A server that fails at once would otherwise get requests without pause.
                is_over.wait(1)

    def _ask(self, options: dict) -> int:
        """Return the number of tokens in the answers to a chat of one or two turns."""
        turns = [{"role": "user", "content": self._chance.choice(self._prompts)}]
        if self._chance.random() < 0.3:
            turns.append({"role": "assistant", "content": self._chance.choice(self._prompts)})
            turns.append({"role": "user", "content": self._chance.choice(self._prompts)})
        length = self._chance.randint(8, self._new_tokens)
        body = {"model": "soak", "messages": turns, "max_tokens": length} | options
        is_stream = options.get("stream", False)
        with self._http.post(
            f"{self._url}/v1/chat/completions", json=body, stream=is_stream, timeout=REQUEST_SECONDS
        ) as response:
            if response.status_code != 200:
                raise ValueError(f"{response.status_code} {response.text[:200]}")
            if is_stream:
                return self._read_some(response.iter_lines())
            return response.json()["usage"]["completion_tokens"]

    def _read_some(self, lines: Iterator[bytes]) -> int:
        """Read some chunks, then stop, as a client that hangs up."""
        chunks = 0
        for line in lines:
            chunks += line.startswith(b"data: {")
            if chunks > self._chance.randint(0, 20):
                break
        return chunks


class Watch:
    """Reader of a server's own reports."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._http = requests.Session()
        self._http.trust_env = False

    def get(self, path: str) -> dict:
        response = self._http.get(f"{self._url}{path}", timeout=REQUEST_SECONDS)
        response.raise_for_status()
        return response.json()

    def blocks_and_tokens(self) -> tuple[int, float]:
        """Return the number of verified blocks, and of the tokens that they committed."""
        described = self.get("/server_info")["internal_states"][0]["sglang_dflash"]
        blocks = described["verified_blocks"]
        return blocks, blocks * described.get("acceptance_length", 0.0)

    def held_tokens(self) -> int:
        return sum(load["num_used_tokens"] for load in self.get("/v1/loads")["loads"])

    def empty(self) -> int:
        """Empty the prefix cache after all requests have ended, and return the tokens that are still held."""
        self._http.post(f"{self._url}/flush_cache?timeout=60", timeout=REQUEST_SECONDS).raise_for_status()
        deadline = time.monotonic() + _LOADS_SECONDS
        while (held := self.held_tokens()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return held


def gpu_mib() -> int | None:
    if not Path("/dev/nvidiactl").exists():
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        query.append(f"--id={visible}")
    return sum(int(line) for line in subprocess.check_output(query, text=True).split())


def soak(args: argparse.Namespace) -> dict:
    """Return the content of OUT.json."""
    prompts = read_prompts(args.prompts)
    watch, tally, is_over = Watch(args.url), Tally(), threading.Event()
    clients = [Client(args.url, prompts, args.new_tokens, seed, tally) for seed in range(args.clients)]
    threads = [threading.Thread(target=client.run, args=(is_over,)) for client in clients]
    rows: list[Row] = []
    started = time.monotonic()
    blocks, committed, tokens, last = *watch.blocks_and_tokens(), 0, started
    for thread in threads:
        thread.start()
    try:
        while time.monotonic() < started + args.seconds:
            time.sleep(min(args.every, max(0.0, started + args.seconds - time.monotonic())))
            now, (new_blocks, new_committed) = time.monotonic(), watch.blocks_and_tokens()
            rows.append(
                Row(
                    round(now - started, 1),
                    tally.answered.total(),
                    tally.failures.total(),
                    round((tally.tokens - tokens) / (now - last), 1),
                    round((new_committed - committed) / max(1, new_blocks - blocks), 3),
                    watch.held_tokens(),
                    gpu_mib(),
                )
            )
            print(rows[-1], flush=True)
            blocks, committed, tokens, last = new_blocks, new_committed, tally.tokens, now
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    return {
        "hardware": hardware("cuda" if Path("/dev/nvidiactl").exists() else "cpu"),
        "versions": versions(),
        "command": f"{date.today()}: python3 scripts/soak.py {shlex.join(sys.argv[1:])}",
        "answered": dict(tally.answered),
        "failures": dict(tally.failures),
        "held_at_the_end": watch.empty(),
        "rows": [asdict(row) for row in rows],
    }


def read_prompts(path: Path) -> list[str]:
    try:
        read = json.loads(path.read_text())
        prompts = read if isinstance(read, list) else [prompt for prompts in read.values() for prompt in prompts]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        sys.exit(f"soak.py: --prompts {path}: {error}")
    if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        sys.exit(f"soak.py: --prompts {path}: expected a list of at least one text, or an object of such lists.")
    return prompts


def markdown(report: dict) -> str:
    names = list(Row.__dataclass_fields__)
    lines = [report["hardware"], report["versions"], "", f"    {report['command']}", ""]
    lines += [f"Answered: {report['answered']}", f"Failures: {report['failures'] or 'none'}"]
    lines += [f"Tokens held when all had ended: {report['held_at_the_end']}", ""]
    lines += ["| " + " | ".join(name.replace("_", " ") for name in names) + " |", "|---" * len(names) + "|"]
    lines += ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in report["rows"]]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--every", type=float, default=20)
    parser.add_argument("--clients", type=positive, default=64)
    parser.add_argument("--new-tokens", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("work/soak"), help="without suffix")
    args = parser.parse_args()
    report = soak(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{args.out}.json").write_text(json.dumps(report) + "\n")
    Path(f"{args.out}.md").write_text(markdown(report))
    if not report["answered"] or report["failures"] or report["held_at_the_end"]:
        sys.exit(f"failures: {report['failures']}; tokens held at the end: {report['held_at_the_end']}")


if __name__ == "__main__":
    main()
