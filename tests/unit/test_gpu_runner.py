"""scripts/test_gpu.py: parts, what a run that is cut off keeps, and the table of results."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_gpu
import torch
from support import gpu_table
from support.ties import Comparison, compare
from test_gpu import Group, Run, groups_of, part_of

# In place of pytest: write a row for each test of a group; "hang" stops before its second test.
STUB = """
import sys, time
from multiprocessing.connection import Connection
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
control = Connection(int(options["--worker"]))
while True:
    try:
        group = control.recv()
    except EOFError:
        break
    for i in range(2):
        if group == "hang" and i:
            time.sleep(60)
        if group == "crash":
            sys.exit(3)
        outcome = "FAILED" if group == "red" else "passed"
        if group == "less" and i:
            continue
        with open(options["--table"], "a") as table:
            table.write(f"{outcome}   3 s  test_{group}.py::test_{i}\\n    a note\\n")
    control.send(group)
"""


def group(name: str, seconds: float = 1, alone: bool = False) -> Group:
    return Group(name, tuple(f"test_{name}.py::test_{i}" for i in range(2)), alone, gpus=1, seconds=seconds)


def run(folder: Path, groups: list[Group], seconds: float = 30, processes: int = 2) -> Run:
    stub = folder / "stub.py"
    stub.write_text(STUB)
    started = Run(folder, ["0"], processes, time.monotonic() + seconds, [sys.executable, str(stub)])
    started.run(groups)
    return started


def test_results_of_every_group(tmp_path, capsys):
    finished = run(tmp_path, [group(name) for name in ("one", "two", "red")] + [group("only", alone=True)])
    results = gpu_table.read(tmp_path / "table.txt")
    assert len(results) == 8
    assert {name for name, outcome in results.items() if outcome == "FAILED"} == set(group("red").tests)
    # A group that runs alone is the last.
    assert list(finished.seconds)[-1] == "only"
    assert set(finished.seconds) == {"one", "two", "red", "only"}
    assert capsys.readouterr().out == (tmp_path / "table.txt").read_text()


def test_what_a_run_that_is_cut_off_keeps(tmp_path):
    started = time.monotonic()
    groups = [group("hang"), group("crash"), group("less"), group("one"), group("late", seconds=90)]
    finished = run(tmp_path, groups, seconds=3)
    assert time.monotonic() - started < 20
    assert set(gpu_table.read(tmp_path / "table.txt")) == {
        *group("one").tests,
        group("hang").tests[0],
        group("less").tests[0],
    }
    table = (tmp_path / "table.txt").read_text()
    # A process that crashes is replaced.
    assert "exit status 3: crash, 2 of 2 tests" in table and "s: less, 1 of 2 tests" in table
    assert "hang, 1 of 2 tests" in table
    assert "not started, 90 s would be too long: late" in table
    assert set(finished.seconds) == {"one"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run tests/gpu")
def test_pytest_runs_the_groups_that_it_is_given(tmp_path):
    listed = test_gpu.list_groups(tmp_path, test_gpu.PYTEST)
    groups = groups_of({name: listed[name] for name in ("tiny-fa3", "tiny-planted")}, {})
    finished = Run(tmp_path, ["0"], 1, time.monotonic() + 120, test_gpu.PYTEST)
    finished.run(groups)
    assert gpu_table.read(tmp_path / "table.txt") == {test: "skipped" for of_group in groups for test in of_group.tests}
    assert set(finished.seconds) == {"tiny-fa3", "tiny-planted"}
    # One process ran both. Another one waits for groups that run alone.
    assert {log.name for log in (tmp_path / "logs").iterdir()} == {"worker-0.log", "worker-alone.log"}


def test_parts_take_about_the_same_time():
    groups = [group(str(i), seconds=10 + 7 * i % 90) for i in range(40)] + [group("only", 60, alone=True)]
    parts = [part_of(groups, i, 3, 12) for i in (1, 2, 3)]
    assert sorted(g.name for part in parts for g in part) == sorted(g.name for g in groups)
    loads = [sum(g.seconds * (12 if g.alone else 1) for g in part) for part in parts]
    assert max(loads) - min(loads) < 90
    for part in parts:
        assert [g.seconds for g in part] == sorted((g.seconds for g in part), reverse=True)


def test_an_unknown_group_starts_first():
    listed = {name: {"tests": ["test_x.py::test_y"], "alone": False, "gpus": 1} for name in ("known", "new")}
    assert [g.name for g in groups_of(listed, {"known": 200.0})] == ["new", "known"]


def test_every_group_has_a_duration(tmp_path):
    """New groups of tests/gpu enter tests/gpu/seconds.json, and old ones leave it."""
    listed = test_gpu.list_groups(tmp_path, test_gpu.PYTEST)
    assert set(listed) == set(json.loads(test_gpu.SECONDS.read_text()))


def test_rows_of_the_table(tmp_path):
    node, table = "tests/gpu/test_x.py::test_y[a, b]", tmp_path / "table.txt"

    def report(when: str, outcome: str) -> SimpleNamespace:
        passed, failed = outcome == "passed", outcome == "failed"
        printed = "\n3 of 4 identical\n"
        return SimpleNamespace(
            when=when, outcome=outcome, passed=passed, failed=failed, duration=12.4, nodeid=node, capstdout=printed
        )

    assert gpu_table.row_of(report("setup", "passed")) is None
    assert gpu_table.row_of(report("teardown", "passed")) is None
    assert gpu_table.read(table) == {}
    for when, outcome, written in (
        ("call", "passed", "passed"),
        ("call", "failed", "FAILED"),
        ("setup", "skipped", "skipped"),
        ("setup", "failed", "FAILED"),
    ):
        row = gpu_table.row_of(report(when, outcome))
        table.write_text(row)
        assert gpu_table.read(table) == {"test_x.py::test_y[a, b]": written}
        assert "    3 of 4 identical\n" in row


def answer(tokens: list[int], lead: float = 1.0) -> dict:
    top = [[[-0.1, token, None], [-0.1 - lead, 0, None]] for token in tokens]
    return {"output_ids": tokens, "meta_info": {"output_top_logprobs": top}}


def test_ties_and_floor():
    plain = [answer([1, 2, 3]), answer([1, 2, 3], lead=0.1), answer([4, 5, 6])]
    dflash = [answer([1, 2, 3]), answer([1, 9, 3]), answer([4, 5])]
    compared = compare(plain, dflash)
    assert (compared.identical, compared.total) == (2, 3)
    compared.assert_ties(0.25)
    compared.assert_floor(3)
    with pytest.raises(AssertionError, match="answer 1 differs at 1: 9 for 2"):
        compared.assert_ties(0.05)
    with pytest.raises(AssertionError, match="53 of 60 identical"):
        Comparison(53, 60, 0.9, ()).assert_floor(60)
    Comparison(54, 60, 0.9, ()).assert_floor(60)
    assert compared.agreed == 6 / 8
    compared.assert_agreed(0.7)
    with pytest.raises(AssertionError, match="usually over 80%"):
        compared.assert_agreed(0.8)
