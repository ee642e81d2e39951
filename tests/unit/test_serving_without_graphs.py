"""A GPU server of which SGLang has captured no graphs: the draft length is fixed, unless the user asked for more."""

import logging
from types import SimpleNamespace

import pytest

from sglang_dflash.engine import stages
from sglang_dflash.engine.adaptive.controller import FixedLength
from sglang_dflash.errors import ConfigError


@pytest.fixture
def start(monkeypatch):
    for name, value in (
        ("get_spec", SimpleNamespace(speculative_adaptive=True)),
        ("runs_cycles", True),
        ("get_observability", SimpleNamespace(enable_metrics=False)),
    ):
        monkeypatch.setattr(stages, name, lambda value=value: value)
    cycle = SimpleNamespace(verification=SimpleNamespace(num_tokens=16))
    built = SimpleNamespace(cycle=cycle, head=SimpleNamespace(num_candidates=16))
    target = SimpleNamespace(decode_cuda_graph_runner=None, device="cuda")
    return lambda asks: stages.Serving.start(SimpleNamespace(asks_for_adaptive=asks), built, None, target)


def test_by_default(start, caplog):
    with caplog.at_level(logging.INFO, logger="sglang_dflash"):
        serving = start(False)
    assert serving.graphs is None and isinstance(serving.draft_length, FixedLength)
    assert [record.getMessage() for record in caplog.records] == [
        "The draft length is fixed: SGLang captured no CUDA graphs of the target."
    ]


def test_asked_for(start):
    with pytest.raises(ConfigError, match=r"^--speculative-adaptive verifies in CUDA graphs: SGLang captured no"):
        start(True)
