"""scripts/soak.py: several clients send requests of every kind for a few seconds."""

import argparse
import json

import pytest
import soak
from serving import DEFAULT

from models.tiny import load_prompts

pytestmark = pytest.mark.parametrize("settings", [DEFAULT], indirect=True, ids=str)


def arguments(server, tmp_path, **changes) -> argparse.Namespace:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps({"code": load_prompts()[:8]}))
    url = f"http://127.0.0.1:{server.get('/server_info')['port']}"
    return argparse.Namespace(
        **{"url": url, "seconds": 8, "every": 3, "clients": 6, "new_tokens": 40, "prompts": prompts} | changes
    )


def test_soak(pair, tmp_path):
    report = soak.soak(arguments(pair.dflash, tmp_path))

    assert not report["failures"]
    assert len(report["answered"]) > len(soak.KINDS) / 2
    assert report["held_at_the_end"] == 0
    assert [row["answered"] > 0 for row in report["rows"]] == [True] * 3
    assert all(1 < row["acceptance_length"] < 16 for row in report["rows"])
    assert report["rows"][-1]["answered"] <= sum(report["answered"].values())
    assert "| acceptance length |" in soak.markdown(report)


@pytest.mark.parametrize("text", ["[]", "{", "3", "[1]"])
def test_prompts_that_are_none(pair, tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)

    with pytest.raises(SystemExit, match=str(path)):
        soak.read_prompts(path)


def test_a_failure_is_told(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "KINDS", {"bad": {"temperature": -1}})
    report = soak.soak(arguments(pair.dflash, tmp_path, seconds=2, every=2, clients=1))

    assert not report["answered"]
    assert all("bad: ValueError: 400" in message for message in report["failures"])
    assert sum(report["failures"].values()) > 0
