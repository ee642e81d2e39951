"""The cycle as a CUDA graph runs it, without CUDA (eager_graphs_plugin): buffers, padding, widths, shards."""

import os
import re
from pathlib import Path

import pytest
from grammars import FUNCTIONS
from serving import SYNC, Settings

pytestmark = pytest.mark.cpu(reason="on a GPU there are CUDA graphs")

PLUGIN = str(Path(__file__).with_name("eager_graphs_plugin"))
PATH = ("PYTHONPATH", os.pathsep.join([PLUGIN, *filter(None, [os.environ.get("PYTHONPATH")])]))
_CORES = sorted(os.sched_getaffinity(0))
CORES = ("SGLANG_CPU_OMP_THREADS_BIND", f"{_CORES[0]}|{_CORES[-1]}")
# Batches of up to 16 requests: some are padded, and some are larger than every graph.
FLAGS = (("cuda-graph-max-bs-decode", 8),)
ADAPTIVE = Settings("graphs-adaptive", flags=FLAGS, dflash_flags=(("speculative-adaptive", True),), env=(PATH,))
TWO_RANKS = Settings("graphs-tp2", flags=(*FLAGS, ("tp-size", 2)), env=(PATH, CORES))
PLAIN = Settings("graphs-plain", plain_flags=(SYNC,))
KINDS = [
    {},
    {"presence_penalty": 0.6},
    {"regex": FUNCTIONS, "ignore_eos": False},
    {"return_logprob": True},
]


@pytest.mark.parametrize(
    ("settings", "widths"), [(ADAPTIVE, {4, 8, 12, 16}), (TWO_RANKS, {16})], ids=[ADAPTIVE.name, TWO_RANKS.name]
)
def test_lossless(keeper, prompts, mixed_prompts, settings, widths):
    pair = keeper.pair(settings, plain=PLAIN)
    requests = [
        {"input_ids": prompt, "max_new_tokens": 20 + 13 * (i % 7), "ignore_eos": True} | KINDS[i % len(KINDS)]
        for i, prompt in enumerate([*mixed_prompts, *prompts[:24]])
    ]

    pair.lossless(lambda server: server.generate_concurrently(requests))
    # Cycles of greedy requests alone.
    pair.lossless(lambda server: server.generate_concurrently(requests[:: len(KINDS)]))

    pair.dflash.wait_until_empty()
    log = pair.dflash.log()
    assert {int(width) for width in re.findall(r"Replayed: (\d+) rows", log)} == widths
    assert re.search(r"[1-9]\d* linear layers have a kernel for up to 16 rows", log)
    assert ("in shards" in log) == (settings is TWO_RANKS)
