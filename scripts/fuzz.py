"""Serve random requests with random flags, with DFLASH and without, and shrink each difference to a smallest request.

    python3 scripts/fuzz.py --minutes 10 --seed 1

Each seed is one case: the flags of a server, and rounds of requests of every kind. A case depends on its seed alone.
The seeds count up until the time is over. A case fails in one of three ways:

* An answer differs from that without speculation, beyond the exceptions in `fuzzing/compare.py`.
* A server ends.
* A request runs, or a KV slot is in use, after all answers have come.

A failing case is shrunk and written to OUT/SEED.json. `--replay OUT/SEED.json` serves it again. The exit status is 1 if
a case failed. Servers run on a CPU, in float32.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from fuzzing import REPO
from fuzzing.asking import ask_rounds
from fuzzing.cases import Case, draw_flags
from fuzzing.compare import EXCEPTIONS, Comparison, Difference
from fuzzing.mixes import draw_rounds
from fuzzing.shrink import shrink
from serving import Pair, ServerError, ServerKeeper

# Attempts to see a part of a failing case fail. Its requests meet in other batches each time.
_TRIALS = 2
# Length of a run, in units of the time that was asked for.
_LONGEST = 1.25
_MOST_SHOWN = 8
# Of the end of a server's log.
_LOG_CHARACTERS = 2500
# Of a request; the file has all of it.
_REQUEST_CHARACTERS = 800


@dataclass
class Finding:
    """One failure of a case.

    Attributes:
        difference: what is wrong.
        request: the request whose answer is wrong. None if a server failed.
    """

    difference: Difference
    request: dict | None

    def __str__(self) -> str:
        return f"{self.difference}\n    of {str(self.request)[:_REQUEST_CHARACTERS]}"


@dataclass
class Report:
    """Results of a run."""

    findings: dict[int, Finding] = field(default_factory=dict)
    excused: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    cases: int = 0


def draw(seed: int) -> Case:
    chance = random.Random(seed)
    case = draw_flags(seed, chance)
    case.rounds = draw_rounds(case, chance)
    return case


class Fuzzer:
    """Servers for cases, at most two at a time. The one without speculation serves many cases."""

    def __init__(self, log_dir: Path, out: Path, shrink_seconds: float) -> None:
        self._keeper = ServerKeeper(log_dir)
        self._keeper.CAPACITY = 2
        self._out, self._shrink_seconds = out, shrink_seconds
        self.report = Report()

    def stop(self) -> None:
        self._keeper.stop()

    def run(self, case: Case) -> None:
        """Serve a case. If it fails, shrink it by its first finding, print what remains, and write it to a file."""
        print(f"seed {case.seed}: {case.pair} {_shown_flags(case)}", flush=True)
        started = time.monotonic()
        findings = self._serve(case)
        self.report.cases += 1
        if not findings:
            print(f"seed {case.seed}: passed in {time.monotonic() - started:.0f} s", flush=True)
            return
        for finding in findings[:_MOST_SHOWN]:
            print(f"seed {case.seed}: FAILED: {finding}", flush=True)
        smallest = findings[0]
        kind = smallest.difference.kind

        def fails(part: Case) -> bool:
            nonlocal smallest
            for _ in range(_TRIALS):
                same = [finding for finding in self._serve(part) if finding.difference.kind == kind]
                if same:
                    smallest = same[0]
                    return True
            return False

        small = shrink(case, fails, self._shrink_seconds)
        self.report.findings[case.seed] = smallest
        path = self._out / f"{case.seed}.json"
        small.dump(path)
        print(f"seed {case.seed}: shrunk to: {smallest.difference}\n  flags: {_shown_flags(case)}", flush=True)
        for i, row in enumerate(small.rounds):
            for request in row:
                print(f"  round {i}: {str(request)[:_REQUEST_CHARACTERS]}", flush=True)
        print(f"  again: python3 scripts/fuzz.py --replay {path}", flush=True)

    def _serve(self, case: Case) -> list[Finding]:
        """Return the findings of a case. Its prompts no longer depend on earlier answers then."""
        findings: list[Finding] = []
        try:
            pair = self._keeper.pair(case.settings())
            comparison = Comparison(pair, case)
            for row in ask_rounds(pair, case):
                for request, dflash, plain in row:
                    self.report.statuses[f"{request['kind']} {dflash['status']}"] += 1
                    differences = comparison.differences(request, dflash, plain)
                    findings += [Finding(difference, request) for difference in differences[:1]]
            self.report.excused += comparison.excused
            self._check_held(pair)
        except ServerError as error:
            # A request without an answer is then no finding of its own.
            return [Finding(Difference("server", _end_of_log(error), "it lives on"), None)]
        except AssertionError as error:
            # From serving.py: a server did not start as it should, or still holds something.
            findings.append(Finding(Difference("held", _end_of_log(error), "nothing"), None))
        return findings

    @staticmethod
    def _check_held(pair: Pair) -> None:
        if not pair.dflash.is_running():
            raise ServerError(f"the server has ended\n{pair.dflash.log_tail()}")
        for server in (pair.dflash, pair.plain):
            if server.is_running():
                server.flush_cache()
                server.wait_until_empty()


def _end_of_log(error: AssertionError) -> str:
    """Return an error of serving.py with the end of the exception in the log that it shows."""
    text = str(error)
    log = next((line for line in text.splitlines() if line.startswith("--- ")), "")
    return f"{text.splitlines()[0]}\n{log}\n{text.split('SIGQUIT received')[0][-_LOG_CHARACTERS:]}"


def _shown_flags(case: Case) -> str:
    flags = " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in case.flags.items())
    return " ".join([*(f"{name}={value}" for name, value in case.env), flags])


def fuzz(seeds: range, minutes: float, out: Path, shrink_seconds: float = 120, replay: Path | None = None) -> Report:
    """Serve the cases of some seeds in turn. The last one may end up to a quarter of the time later."""
    started, slowest = time.monotonic(), 0.0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as logs:
        fuzzer = Fuzzer(Path(logs), out, shrink_seconds)
        try:
            if replay is not None:
                fuzzer.run(Case.load(replay))
                return fuzzer.report
            for seed in seeds:
                begun = time.monotonic()
                if fuzzer.report.cases and begun + slowest > started + _LONGEST * 60 * minutes:
                    break
                fuzzer.run(draw(seed))
                slowest = max(slowest, time.monotonic() - begun)
        finally:
            fuzzer.stop()
    return fuzzer.report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--seed", type=int, help="the first; by default one of the clock")
    parser.add_argument("--cases", type=int, default=10**9, help="at most")
    parser.add_argument("--shrink-seconds", type=float, default=120, help="to shrink a case that fails")
    parser.add_argument("--out", type=Path, default=REPO / "work" / "fuzz")
    parser.add_argument("--replay", type=Path, help="a case that was written, in place of drawn ones")
    args = parser.parse_args()
    seed = int(time.time()) if args.seed is None else args.seed
    report = fuzz(range(seed, seed + args.cases), args.minutes, args.out, args.shrink_seconds, args.replay)
    print(f"\n{report.cases} cases from seed {seed}; answers: {dict(report.statuses)}")
    for name, count in report.excused.items():
        print(f"excused {count} times: {name}. {EXCEPTIONS[name]}")
    for number, finding in report.findings.items():
        print(f"FAILED seed {number}: {finding.difference}")
    if report.findings:
        sys.exit(1)


if __name__ == "__main__":
    main()
