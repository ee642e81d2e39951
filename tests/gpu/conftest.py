"""Fixtures of tests that need a GPU, their groups, and the table of their results.

Tests of a group share engines, so one process runs them. `scripts/test_gpu.sh` has several processes, each of which
runs one group at a time. A test names its group by a format string of its parameters,
`@pytest.mark.group("tiny-{backend}")`. Others are in that of their file.

Marker `alone`: no other test may use the GPUs, of which the test needs `gpus`.
Marker `rehearsed`: the test runs on a CPU too with `--rehearse`.
"""

import fcntl
import json
import re
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from engines import ON_CPU, Engines, Shared
from support import gpu_table
from transformers import AutoTokenizer

from models.tiny import TARGET_DIR, load_prompts

HERE = Path(__file__).parent


def pytest_configure():
    # A terminated run ends its engines, as an interrupted run does.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)


def group_of(item) -> str:
    marker = item.get_closest_marker("group")
    if marker is None:
        return item.path.stem.removeprefix("test_")
    params = item.callspec.params if hasattr(item, "callspec") else {}
    # The name of a log file too.
    return re.sub("[^A-Za-z0-9_.-]+", "-", marker.args[0].format(**params))


def pytest_collection_modifyitems(config, items):
    here = [item for item in items if HERE in item.path.parents]
    for item in here:
        if not ON_CPU:
            continue
        on_cpu = item.get_closest_marker("rehearsed")
        if not config.getoption("--rehearse") or on_cpu is None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
    if config.getoption("--table"):
        done = gpu_table.read(Path(config.getoption("--table")))
        left_out = [item for item in here if gpu_table.test_name(item.nodeid) in done]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if config.getoption("--list-groups"):
        groups: dict[str, dict] = {}
        for item in here:
            of_group = groups.setdefault(group_of(item), {"tests": [], "alone": False, "gpus": 1})
            of_group["tests"].append(gpu_table.test_name(item.nodeid))
            alone = item.get_closest_marker("alone")
            if alone is not None:
                of_group |= {"alone": True, "gpus": alone.kwargs.get("gpus", 1)}
        Path(config.getoption("--list-groups")).write_text(json.dumps(groups))


def pytest_runtestloop(session) -> bool | None:
    """Run the groups that a pipe names, one at a time, and answer each name. Without `--worker`, run all tests."""
    fd = session.config.getoption("--worker")
    if fd is None:
        return None
    items_of: dict[str, list] = {}
    for item in session.items:
        items_of.setdefault(group_of(item), []).append(item)
    with Connection(fd) as control:
        for name in received(control):
            items = items_of.get(name, [])
            for item, following in zip(items, [*items[1:], None], strict=True):
                # If no test follows, fixtures end, and engines with them.
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            control.send(name)
    return True


def received(control: Connection) -> Iterator[str]:
    """Yield what comes until the other end is closed."""
    while True:
        try:
            yield control.recv()
        except EOFError:
            return


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    engines = getattr(item, "funcargs", {}).get("engines")
    if report.failed and engines is not None:
        report.sections.append(("log of the last engine", engines.log_tail()))
    if item.config.getoption("--table"):
        write_result(Path(item.config.getoption("--table")), report, group_of(item))
    return report


def write_result(table: Path, report, group: str) -> None:
    """Append a report to the table. Write why a test failed to the log of its group."""
    line = gpu_table.row_of(report)
    if line is not None:
        with table.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(line)
    if report.failed:
        log = table.parent / "logs" / f"{group}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("a") as file:
            file.write(f"{report.nodeid}, {report.when}\n{report.longreprtext}\n")
            file.writelines(f"--- {title}\n{content}\n" for title, content in report.sections)


@pytest.fixture(scope="session")
def shared(request, tmp_path_factory) -> Shared:
    return Shared(Path(request.config.getoption("--answers") or tmp_path_factory.mktemp("answers")))


@pytest.fixture(scope="session")
def engines(tmp_path_factory, shared):
    engines = Engines(tmp_path_factory.mktemp("engines"), shared)
    yield engines
    engines.stop()


@pytest.fixture(scope="session")
def backend(request) -> str:
    """Attention backend. Tests with the same one follow each other, and so do those with the same `shape`."""
    return request.param


@pytest.fixture(scope="session")
def shape(request) -> str:
    """Chains or trees."""
    return request.param


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Return the tiny pair's prompts: 60 of 20 to 200 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR)
    return [tokenizer(prompt)["input_ids"] for prompt in load_prompts()]
