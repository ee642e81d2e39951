import pytest
from resolving import asked
from sglang.srt.runtime_context import SpawnRanks, publish, restore_context, snapshot_context

from sglang_dflash.ops import add_norm, small_m_linear


@pytest.fixture
def publish_server(monkeypatch):
    """Return a function that publishes a server's flags, for layers and norms that a GPU would replace."""
    monkeypatch.setattr(small_m_linear, "faster_rows", lambda weight, is_gated: small_m_linear.MAX_ROWS)
    monkeypatch.setattr(add_norm, "is_plain_norm", lambda norm: True)
    before = snapshot_context()
    yield lambda **flags: publish(asked(**flags), role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    restore_context(before)
