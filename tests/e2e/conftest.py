"""Fixtures: servers, prompts and the oracle.

A test names its settings by `@pytest.mark.parametrize("settings", [...], indirect=True)` and asks for `pair`.
`settings` has session scope, so pytest runs all tests with the same settings together, and each pair starts once.
"""

import signal

import pytest
import torch
from oracle import Oracle
from serving import TREES_ON_A_GPU, ServerKeeper, Settings
from transformers import AutoTokenizer

from models.tiny import TARGET_DIR, load_prompts


def pytest_configure():
    # A terminated run ends its servers, as an interrupted run does. With pytest-xdist each process interrupts itself
    # when the first one ends; a process in a shell's background would otherwise ignore that.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)


def params_of(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def pytest_itemcollected(item):
    """Give all tests of the same settings, or of the same file, to one process of pytest-xdist."""
    if item.config.pluginmanager.hasplugin("xdist"):
        settings = params_of(item).get("settings")
        group = settings.name if isinstance(settings, Settings) else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_modifyitems(items):
    for item in items:
        marker = item.get_closest_marker("cpu")
        if marker is not None and torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(**marker.kwargs))
        settings = params_of(item).get("settings")
        if torch.cuda.is_available() and isinstance(settings, Settings) and settings.num_nodes is not None:
            item.add_marker(pytest.mark.skip(reason=TREES_ON_A_GPU))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    keeper = getattr(item, "funcargs", {}).get("keeper")
    if report.failed and keeper is not None:
        report.sections += [(f"log of {server.log_path.stem}", server.log_tail()) for server in keeper.servers]
    return report


@pytest.fixture(scope="session")
def keeper(tmp_path_factory):
    keeper = ServerKeeper(tmp_path_factory.mktemp("servers"))
    yield keeper
    keeper.stop()


@pytest.fixture(scope="session")
def settings(request):
    return request.param


@pytest.fixture
def pair(keeper, settings):
    """Two servers with empty caches. After the test no request may run on, and no KV slot may be in use."""
    pair = keeper.pair(settings)
    yield pair
    pair.ask(lambda server: server.flush_cache())
    pair.ask(lambda server: server.wait_until_empty())


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET_DIR)


@pytest.fixture(scope="session")
def prompts(tokenizer):
    """Prompts of 20 to 200 tokens, 60 of them."""
    return [tokenizer(prompt)["input_ids"] for prompt in load_prompts()]


@pytest.fixture(scope="session")
def mixed_prompts(prompts):
    """Prompts of 1 to several hundred tokens, 16 of them, with lengths around pages, chunks and blocks."""
    text = sum(prompts, [])
    lengths = [1, 2, 15, 16, 17, 31, 63, 64, 65, 100, 127, 128, 129, 256, 333, 500]
    return [text[17 * i : 17 * i + length] for i, length in enumerate(lengths)]


@pytest.fixture(scope="session")
def oracle():
    return Oracle()
