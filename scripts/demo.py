"""Client of demo.sh: streams an answer to the terminal, marks the drafts, and compares two answers."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import requests
from transformers import AutoTokenizer, PreTrainedTokenizerBase

START_SECONDS = 240
# Decoded for a token that has only some bytes of a character.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Question:
    """A question for a pair.

    Attributes:
        text: the question, unless the user gives another.
        warm_up: a question that is asked first and not timed.
        is_chat: use the target's chat template, and stop at the end of the answer.
        new_tokens: most tokens of an answer.
        runs: number of times that it is asked; the fastest counts.
    """

    text: str
    warm_up: str
    is_chat: bool
    new_tokens: int
    runs: int

    def body(self, text: str, tokenizer: PreTrainedTokenizerBase) -> dict:
        """Return the body of a greedy, streamed request."""
        if self.is_chat:
            message = {"role": "user", "content": text}
            text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        sampling = {"temperature": 0, "max_new_tokens": self.new_tokens, "ignore_eos": not self.is_chat}
        return {"text": text, "sampling_params": sampling, "stream": True}


# The answers are easy to read, and are accepted about as well as those to the average prompt.
CODE = Question(
    text="    def __iter__(self):\n        return self\n\n    @property",
    warm_up="class PriorityQueue(Queue):",
    is_chat=False,
    new_tokens=128,
    runs=8,
)
QUESTIONS = {
    "tiny": CODE,
    "hybrid": CODE,
    "smollm2": Question(
        text="Write a short poem about the sea.",
        warm_up="Hello!",
        is_chat=True,
        new_tokens=128,
        runs=2,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    ask_parser = commands.add_parser("ask", help="wait for a server, stream an answer, keep the numbers")
    ask_parser.add_argument("--pair", choices=QUESTIONS, required=True)
    ask_parser.add_argument("--name", choices=["dflash", "plain"], required=True)
    ask_parser.add_argument("--url", required=True)
    ask_parser.add_argument("--pid", type=int, required=True, help="the server's process")
    ask_parser.add_argument("--tokenizer", type=Path, required=True, help="the target's folder")
    ask_parser.add_argument("--result", type=Path, required=True)
    ask_parser.add_argument("--question", help="replaces the pair's question")
    ask_parser.add_argument("--plain", action="store_true", help="brackets instead of colours")
    ask_parser.set_defaults(run=ask)
    compare_parser = commands.add_parser("compare", help="a table of two results")
    compare_parser.add_argument("--pair", choices=QUESTIONS, required=True)
    compare_parser.add_argument("dflash", type=Path)
    compare_parser.add_argument("plain", type=Path)
    compare_parser.set_defaults(run=lambda args: compare(args.pair, args.dflash, args.plain))
    args = parser.parse_args()
    args.run(args)


def ask(args: argparse.Namespace) -> None:
    """Ask a server that is starting, and write the figures of the fastest answer to `args.result`."""
    http = requests.Session()
    http.trust_env = False
    started = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    wait_until_ready(http, args.url, args.pid)
    info = http.get(f"{args.url}/server_info", timeout=60).json()
    worker = info["internal_states"][0].get("sglang_dflash")
    served_by = f"sglang-dflash {worker['version']}, {worker['worker']}" if worker else "no speculation"
    print(f"[{args.name}] ready after {time.monotonic() - started:.0f} s, served by: {served_by}")
    if (args.name == "dflash") != bool(worker):
        sys.exit("DFLASH is not served by sglang-dflash, or is served without being asked for.")

    question = QUESTIONS[args.pair]
    text = question.text if args.question is None else args.question
    if not text:
        sys.exit("The question is empty.")
    answer(http, args.url, question.body(question.warm_up, tokenizer))
    view = TokenView(tokenizer, coloured=sys.stdout.isatty() and not args.plain)
    if worker:
        print(view.legend())
    print(f"\n{view.dim(text)}" + ("\n\n" if question.is_chat else ""), end="", flush=True)
    body = question.body(text, tokenizer)
    runs = [answer(http, args.url, body, view)]
    runs += [answer(http, args.url, body) for _ in range(question.runs - 1)]
    fastest = min(runs, key=lambda run: run["seconds"])
    fastest["device"] = info["device"]
    args.result.write_text(json.dumps(fastest))
    print(
        f"\n\n[{args.name}] {fastest['tokens']} tokens in {fastest['seconds']:.2f} s (fastest of {question.runs}): "
        f"{fastest['tokens_per_second']:.1f} tokens/s, {fastest['accept_length']:.2f} tokens per decode cycle"
    )
    if worker:
        of_length = ", ".join(f"{i + 1}: {count}" for i, count in enumerate(fastest["histogram"]) if count)
        print(f"[{args.name}] decode cycles by the tokens that they gave: {of_length}")


class TokenView:
    """Printer of a streamed answer that marks accepted drafts. The target chose the other tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, coloured: bool):
        self.tokenizer = tokenizer
        self.coloured = coloured
        self.tokens: list[int] = []
        self.printed = ""
        self.num_drafts = self.num_chunks = 0
        self.is_marked = False

    def legend(self) -> str:
        how = "green" if self.coloured else "in [brackets]"
        return f"{how}: drafted and accepted; the target chose the other tokens itself"

    def dim(self, text: str) -> str:
        return f"\033[2m{text}\033[0m" if self.coloured else text

    def show(self, chunk: dict) -> None:
        """Print the tokens that a chunk adds. A cycle's tokens are its accepted drafts, then one of the target's."""
        new = chunk["output_ids"][len(self.tokens) :]
        num_drafts = max(0, len(new) - 1)
        if chunk["meta_info"]["finish_reason"] is not None:
            # The last cycle may have been cut among its drafts. Only the last chunk has the total.
            num_drafts = chunk["meta_info"].get("spec_num_correct_drafts", 0) - self.num_drafts
        self.num_drafts += num_drafts
        self.num_chunks += 1
        for i, token in enumerate(new):
            self.tokens.append(token)
            self._print(is_draft=i < num_drafts)

    def end(self, num_cycles: int) -> None:
        """Finish the output of an answer that took `num_cycles` decode cycles."""
        self._mark(False)
        num_joined = num_cycles + 1 - self.num_chunks
        if num_joined > 0:
            print(f"\n({num_joined} cycles arrived with the next one: the target's token between them is marked too)")

    def _print(self, is_draft: bool) -> None:
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if text.endswith(INCOMPLETE) or len(text) == len(self.printed):
            return
        self._mark(is_draft)
        print(text[len(self.printed) :], end="", flush=True)
        self.printed = text

    def _mark(self, is_draft: bool) -> None:
        if is_draft != self.is_marked:
            begin, end = ("\033[32m", "\033[0m") if self.coloured else ("[", "]")
            print(begin if is_draft else end, end="", flush=True)
            self.is_marked = is_draft


def answer(http: requests.Session, url: str, body: dict, view: TokenView | None = None) -> dict:
    """Stream one answer, to the terminal if there is a `view`. Return its text and figures."""
    chunk, sent = {}, time.perf_counter()
    for chunk in stream(http, url, body):
        if view:
            view.show(chunk)
    seconds = time.perf_counter() - sent
    meta_info = chunk["meta_info"]
    tokens = meta_info["completion_tokens"]
    # The first token comes from the prompt's forward, the rest from decode cycles.
    cycles = meta_info.get("spec_verify_ct") or max(1, tokens - 1)
    if view:
        view.end(cycles)
    return {
        "text": chunk["text"],
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "accept_length": (tokens - 1) / cycles,
        "cycle_ms": 1000 * seconds / cycles,
        "histogram": meta_info.get("spec_correct_drafts_histogram", [cycles]),
    }


def stream(http: requests.Session, url: str, body: dict) -> Iterator[dict]:
    """Yield the chunks of an answer. Each chunk contains the answer so far."""
    with http.post(f"{url}/generate", json=body, stream=True, timeout=300) as response:
        if response.status_code != 200:
            sys.exit(f"{response.status_code}: {response.text}")
        for line in response.iter_lines(chunk_size=1):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                chunk = json.loads(line.removeprefix(b"data: "))
                if "error" in chunk:
                    # The HTTP status of a stream is sent before its errors.
                    sys.exit(f"{chunk['error']['code']}: {chunk['error']['message']}")
                yield chunk


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


def compare(pair: str, dflash_file: Path, plain_file: Path) -> None:
    """Print the figures of both servers. Exit with an error if DFLASH changed the text on a CPU."""
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
    if not QUESTIONS[pair].is_chat:
        print("\nThe pair is tiny: its text shows that both agree, not how well a real model writes.")
    if speedup < 1:
        print(
            f"\nSpeculation is slower here: a cycle takes {dflash['cycle_ms'] / plain['cycle_ms']:.1f} plain steps "
            f"and yields {dflash['accept_length']:.1f} tokens. A CPU has little idle arithmetic to verify drafts with, "
            "least of all when it is busy; a GPU has more."
        )
    # On a GPU in bf16, near-equal logits may be ordered differently because sums are computed in another order.
    if not same and dflash["device"] == "cpu":
        sys.exit("DFLASH changed the text.")


if __name__ == "__main__":
    main()
