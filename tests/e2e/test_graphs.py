"""The cycle in CUDA graphs, without CUDA (tests/plugins/eager_graphs.py): buffers, padding, draft lengths, shards."""

import re

import pytest
from grammars import FUNCTIONS
from serving import PLAIN_SYNC, TWO_CORES, Settings, assert_same_answers, trees, with_plugin
from various import KINDS, various_requests

from sglang_dflash.ops.reference.argmax_product import MAX_ROWS

pytestmark = pytest.mark.cpu(reason="on a GPU there are CUDA graphs")

PLUGIN = with_plugin("eager_graphs")
# Some batches are padded, and some of the up to 16 requests exceed every graph. On a CPU, `cuda-graph-max-bs-decode`
# would capture all sizes up to 16.
FLAGS = (("cuda-graph-bs-decode", (1, 2, 4, 8)),)
ADAPTIVE = Settings(
    "graphs-adaptive-tp2",
    flags=(*FLAGS, ("tp-size", 2)),
    dflash_flags=(("speculative-adaptive", True),),
    env=PLUGIN + TWO_CORES,
    plain=PLAIN_SYNC,
)
# Batches of other sizes run without a graph, with whole blocks. Graphs verify with this package's attention, as they do
# in place of FlashInfer's.
NOT_PADDED = Settings(
    "graphs-not-padded",
    flags=(("cuda-graph-bs-decode", (1, 3, 8)), ("disable-cuda-graph-padding", True)),
    dflash_flags=(("speculative-adaptive", True),),
    env=with_plugin("eager_graphs", "chain_attention"),
    plain=PLAIN_SYNC,
)
# More nodes than a block has tokens. One of the ranks exports metrics, and both choose the same draft lengths.
TREES = Settings(
    "graphs-trees-tp2",
    flags=(*FLAGS, ("tp-size", 2)),
    dflash_flags=(*trees(8, 24), ("speculative-adaptive", True), ("enable-metrics", True)),
    env=PLUGIN + TWO_CORES,
    plain=PLAIN_SYNC,
)
# Trees by default: of 16 nodes, and of 32 in batches of up to 4 requests, half of the largest. The lm_head has copies.
GROWN = Settings(
    "graphs-grown",
    flags=FLAGS,
    dflash_flags=(("speculative-adaptive", True),),
    env=with_plugin("eager_graphs", "default_trees", "weight_copies"),
    plain=PLAIN_SYNC,
)
# The cycle handles the first request, and samples the last; the others need SGLang's sampler, two requests at a time.
MIXED = [
    {},
    {"frequency_penalty": 0.5, "return_logprob": True, "top_logprobs_num": 2},
    {"logit_bias": {"263": 3.0}},
    {"return_logprob": True, "token_ids_logprob": [5, 200]},
    {"regex": FUNCTIONS, "ignore_eos": False, "return_logprob": True, "top_logprobs_num": 1},
    {"min_new_tokens": 20, "stop_token_ids": [200], "ignore_eos": False},
    {"temperature": 1e-4, "top_k": 2, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 1e-4, "top_p": 0.9},
]
LOGPROBS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")


def log_probabilities(entries: list | None) -> list[float]:
    """Return log probabilities in order. An entry is [log probability, token, text], or a list of these."""
    flat = [each for entry in entries or [] for each in (entry if isinstance(entry[0], list) else [entry])]
    return [number for number, *_ in flat]


@pytest.mark.parametrize(
    ("settings", "num_rows"),
    [
        (ADAPTIVE, {1, 4, 8, 12, 16}),
        (NOT_PADDED, {1, 4, 8, 12, 16}),
        (TREES, {1, 6, 12, 24}),
        (GROWN, {1, 4, 8, 16, 32}),
    ],
    ids=lambda value: value.name if isinstance(value, Settings) else "",
)
def test_lossless(keeper, prompts, mixed_prompts, settings, num_rows):
    pair = keeper.pair(settings)
    requests = various_requests(mixed_prompts)

    pair.lossless(lambda server: server.generate_concurrently(requests))
    # Cycles of greedy requests alone.
    pair.lossless(lambda server: server.generate_concurrently(requests[:: len(KINDS)]))
    mixed = [
        {"input_ids": prompt, "max_new_tokens": 40, "ignore_eos": True} | MIXED[i % len(MIXED)]
        for i, prompt in enumerate(prompts[: 2 * len(MIXED)])
    ]
    dflash, plain = pair.ask(lambda server: server.generate_concurrently(mixed))
    assert_same_answers(dflash, plain)
    for mine, expected in zip(dflash, plain):
        for field in LOGPROBS:
            assert (field in mine["meta_info"]) == (field in expected["meta_info"])
            numbers = log_probabilities(expected["meta_info"].get(field))
            assert log_probabilities(mine["meta_info"].get(field)) == pytest.approx(numbers, abs=1e-4)

    pair.dflash.wait_until_empty()
    log = pair.dflash.log()
    assert {int(rows) for rows in re.findall(r"Replayed: (\d+) rows", log)} == num_rows
    described = pair.dflash.internal_state()["sglang_dflash"]
    graphs, common = described["adaptive_graphs"], str(described["verified_rows"])
    sizes = graphs["batch_sizes_by_verified_rows"]
    assert {int(rows) for rows in sizes} == num_rows
    num_graphs = sum(len(of_rows) for rows, of_rows in sizes.items() if rows != common)
    assert graphs["others"]["num_graphs"] == num_graphs > 0 and graphs["others"]["seconds"] > 0
    assert f"{num_graphs} CUDA graphs of other draft lengths were captured in " in log
    assert re.search(r"[1-9]\d* linear layers use the kernel for up to 64 rows", log)
    assert re.search(r"[1-9]\d* norms use the kernel that adds the residual", log)
    assert ("Chains have our attention." in log) == (settings is NOT_PADDED)
    # Cycles of greedy requests have graphs without all logits: with shards of them, or with bounds of few rows.
    assert ("greedy" in log) == (settings is not NOT_PADDED)
    bounded = {int(rows) for rows in re.findall(r"Greedy tokens of (\d+) rows are found by bounds", log)}
    captured = {bs * int(rows) for rows, of_rows in sizes.items() for bs in of_rows}
    assert bounded == ({rows for rows in captured if rows <= MAX_ROWS} if settings is GROWN else set())
