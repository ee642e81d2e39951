"""tests/plugins/no_copies.py, with which a benchmark measures what copies give."""

import importlib.util
from pathlib import Path

import torch

from sglang_dflash.draft.texts import Copies

PLUGIN = Path(__file__).parents[1] / "plugins" / "no_copies.py"


def test_nothing_is_copied(monkeypatch):
    monkeypatch.setattr(Copies, "place", Copies.place)
    spec = importlib.util.spec_from_file_location("no_copies", PLUGIN)
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)

    plugin.register()
    candidates, logits = torch.arange(6).view(1, 3, 2), torch.zeros(1, 3, 2)
    copies = Copies.place(torch.zeros(4, 16, dtype=torch.int32), None, candidates, logits)

    assert copies == Copies(None, None)
    assert candidates.flatten().tolist() == list(range(6))
