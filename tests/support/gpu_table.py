"""Table of results of tests/gpu, written test by test, so that a run that is cut off keeps what has ended."""

from __future__ import annotations

from pathlib import Path

# Indents what a test has printed.
_NOTE = "    "


def test_name(node_id: str) -> str:
    """Return a test's name in the table: pytest's, without the folder."""
    return node_id.removeprefix("tests/gpu/")


def row_of(report) -> str | None:
    """Return the lines of the table for a report of pytest; None: another report of the test has them.

    A test has a row once it has run, was skipped, or failed in a fixture.
    """
    if report.when != "call" and not (report.when == "setup" and not report.passed):
        return None
    outcome = "FAILED" if report.failed else report.outcome
    printed = [line for line in report.capstdout.splitlines() if line.strip()]
    lines = [f"{outcome:7} {report.duration:5.0f} s  {test_name(report.nodeid)}", *(_NOTE + line for line in printed)]
    return "\n".join(lines) + "\n"


def read(path: Path) -> dict[str, str]:
    """Return the outcome of each test in a table: passed, FAILED or skipped. There may be no table yet."""
    if not path.exists():
        return {}
    rows = [line.split(maxsplit=3) for line in path.read_text().splitlines() if line and not line.startswith(_NOTE)]
    return {name: outcome for outcome, _, _, name in rows if outcome in ("passed", "FAILED", "skipped")}
