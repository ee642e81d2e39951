"""The client of demo.sh: streams a completion to the terminal, and compares two of them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import requests

REPO = Path(__file__).resolve().parents[1]
PROMPTS = REPO / "sglang_dflash" / "tiny_pair" / "prompts.json"
# By their beginnings. The first one's continuation is easy to read, and drafted about as well as the average prompt's.
PROMPT = "    def __iter__(self):\n        return self\n\n    @property"
WARM_UP_PROMPT = "class PriorityQueue(Queue):"
NEW_TOKENS = 128
RUNS = 8
START_SECONDS = 240


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    ask_parser = commands.add_parser("ask", help="wait for a server, stream one completion, keep the numbers")
    ask_parser.add_argument("--name", required=True)
    ask_parser.add_argument("--url", required=True)
    ask_parser.add_argument("--pid", type=int, required=True, help="the server's process")
    ask_parser.add_argument("--result", type=Path, required=True)
    ask_parser.set_defaults(run=lambda args: ask(args.name, args.url, args.pid, args.result))
    compare_parser = commands.add_parser("compare", help="a table of two results")
    compare_parser.add_argument("dflash", type=Path)
    compare_parser.add_argument("plain", type=Path)
    compare_parser.set_defaults(run=lambda args: compare(args.dflash, args.plain))
    args = parser.parse_args()
    args.run(args)


def ask(name: str, url: str, pid: int, result: Path) -> None:
    http = requests.Session()
    http.trust_env = False
    started = time.monotonic()
    wait_until_ready(http, url, pid)
    worker = http.get(f"{url}/server_info", timeout=60).json()["internal_states"][0].get("sglang_dflash")
    served_by = f"sglang-dflash {worker['version']}, {worker['worker']}" if worker else "no speculation"
    print(f"[{name}] ready after {time.monotonic() - started:.0f} s, served by: {served_by}")
    if name == "dflash" and not worker:
        sys.exit("DFLASH is not served by sglang-dflash.")

    prompts = json.loads(PROMPTS.read_text())
    complete(http, url, find(prompts, WARM_UP_PROMPT))
    prompt = find(prompts, PROMPT)
    dim, normal = ("\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"\n{dim}{prompt}{normal}", end="", flush=True)
    runs = [complete(http, url, prompt, show=True)]
    runs += [complete(http, url, prompt) for _ in range(RUNS - 1)]
    fastest = min(runs, key=lambda run: run["seconds"])
    fastest["device"] = http.get(f"{url}/server_info", timeout=60).json()["device"]
    result.write_text(json.dumps(fastest))
    print(
        f"\n\n[{name}] {fastest['tokens']} tokens in {fastest['seconds']:.2f} s (fastest of {RUNS} runs): "
        f"{fastest['tokens_per_second']:.1f} tokens/s, {fastest['accept_length']:.2f} tokens per decode cycle"
    )


def complete(http: requests.Session, url: str, prompt: str, show: bool = False) -> dict:
    """Stream one completion, to the terminal if `show`; its text and numbers."""
    text, chunk, sent = "", {}, time.perf_counter()
    for chunk in stream(http, url, prompt):
        if show:
            print(chunk["text"][len(text) :], end="", flush=True)
        text = chunk["text"]
    seconds = time.perf_counter() - sent
    tokens = chunk["meta_info"]["completion_tokens"]
    # The first token comes from the prompt's forward, the rest from decode cycles.
    cycles = chunk["meta_info"].get("spec_verify_ct") or tokens - 1
    return {
        "text": text,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "accept_length": (tokens - 1) / cycles,
        "cycle_ms": 1000 * seconds / cycles,
    }


def wait_until_ready(http: requests.Session, url: str, pid: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            if http.get(f"{url}/health", timeout=10).status_code == 200:
                return
        except requests.ConnectionError:
            pass
        if not is_running(pid):
            sys.exit("The server ended before it was ready.")
        time.sleep(0.5)
    sys.exit(f"The server is not ready after {START_SECONDS} s.")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A server that ended stays a zombie until demo.sh waits for it.
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def find(prompts: list[str], start: str) -> str:
    return next(prompt for prompt in prompts if prompt.startswith(start))


def stream(http: requests.Session, url: str, prompt: str):
    """The chunks of one greedy completion; each has the whole text so far."""
    body = {
        "text": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "stream": True,
    }
    with http.post(f"{url}/generate", json=body, stream=True, timeout=300) as response:
        if response.status_code != 200:
            sys.exit(f"{response.status_code}: {response.text}")
        for line in response.iter_lines(chunk_size=1):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line.removeprefix(b"data: "))


def compare(dflash_file: Path, plain_file: Path) -> None:
    dflash, plain = (json.loads(file.read_text()) for file in (dflash_file, plain_file))
    print(f"\n{'':24}{'DFLASH':>12}{'plain':>12}")
    for label, field, digits in (
        ("tokens", "tokens", 0),
        ("seconds", "seconds", 2),
        ("tokens per second", "tokens_per_second", 1),
        ("tokens per decode cycle", "accept_length", 2),
        ("ms per decode cycle", "cycle_ms", 1),
    ):
        print(f"{label:24}{dflash[field]:>12.{digits}f}{plain[field]:>12.{digits}f}")
    same = dflash["text"] == plain["text"]
    print(f"{'texts':24}{'identical' if same else 'DIFFERENT':>24}")
    speedup = plain["seconds"] / dflash["seconds"]
    print(f"{'speed-up':24}{f'{speedup:.2f}x':>24}")
    print("\nThe pair has 4 million parameters: its text shows that both servers agree, not what a good model writes.")
    if speedup < 1:
        steps = dflash["cycle_ms"] / plain["cycle_ms"]
        print(
            f"Speculation is slower here: drafting and verifying 16 tokens costs {steps:.1f} plain steps, and yields "
            f"{dflash['accept_length']:.1f} tokens. A CPU, above all a busy one, has no idle arithmetic to verify them "
            "with; a GPU has."
        )
    # In bf16, a tie between two tokens may fall differently where the GPU sums in another order.
    if not same and dflash["device"] == "cpu":
        sys.exit("DFLASH changed the text.")


if __name__ == "__main__":
    main()
