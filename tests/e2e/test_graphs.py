"""The cycle as a CUDA graph runs it, without CUDA (eager_graphs_plugin): buffers, padding, widths, shards."""

import re

import pytest
from serving import SYNC, TWO_CORES, Settings, with_plugin
from various import KINDS, various_requests

pytestmark = pytest.mark.cpu(reason="on a GPU there are CUDA graphs")

PLUGIN = with_plugin("eager_graphs")
# Batches of up to 16 requests: some are padded, and some are larger than every graph.
FLAGS = (("cuda-graph-max-bs-decode", 8),)
ADAPTIVE = Settings("graphs-adaptive", flags=FLAGS, dflash_flags=(("speculative-adaptive", True),), env=PLUGIN)
# No graph but of these sizes; other batches run without one, with whole blocks.
NOT_PADDED = Settings(
    "graphs-not-padded",
    flags=(("cuda-graph-bs-decode", (1, 3, 8)), ("disable-cuda-graph-padding", True)),
    dflash_flags=(("speculative-adaptive", True),),
    env=PLUGIN,
)
TWO_RANKS = Settings("graphs-tp2", flags=(*FLAGS, ("tp-size", 2)), env=PLUGIN + TWO_CORES)
PLAIN = Settings("graphs-plain", plain_flags=(SYNC,))


@pytest.mark.parametrize(
    ("settings", "widths"),
    [(ADAPTIVE, {4, 8, 12, 16}), (NOT_PADDED, {4, 8, 12, 16}), (TWO_RANKS, {16})],
    ids=[ADAPTIVE.name, NOT_PADDED.name, TWO_RANKS.name],
)
def test_lossless(keeper, prompts, mixed_prompts, settings, widths):
    pair = keeper.pair(settings, plain=PLAIN)
    requests = various_requests([*mixed_prompts, *prompts[:24]])

    pair.lossless(lambda server: server.generate_concurrently(requests))
    # Cycles of greedy requests alone.
    pair.lossless(lambda server: server.generate_concurrently(requests[:: len(KINDS)]))

    pair.dflash.wait_until_empty()
    log = pair.dflash.log()
    assert {int(width) for width in re.findall(r"Replayed: (\d+) rows", log)} == widths
    assert re.search(r"[1-9]\d* linear layers have a kernel for up to 32 rows", log)
    assert ("in shards" in log) == (settings is TWO_RANKS)
