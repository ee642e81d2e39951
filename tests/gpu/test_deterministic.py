"""`--enable-deterministic-inference` with seeds gives the same tokens in every batch, on every backend."""

import pytest
from engines import BACKENDS, greedy, tiny
from support.ties import first_difference, tokens_per_cycle

NUM_REQUESTS, NEW_TOKENS = 4, 200
# With this many tokens, FlashInfer would split the KV of 16 requests differently than the KV of one.
PROMPT_LEN = 1400
KINDS = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0},
]
FLAGS = {
    "enable_deterministic_inference": True,
    "max_total_tokens": 40_000,
    "max_running_requests": 16,
    # Prompts are prefilled whole, alone and with others.
    "chunked_prefill_size": 32_768,
    "cuda_graph_bs_decode": [1, 4, 16],
}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_alone_and_beside_others(backend, engines, prompts):
    text = sum(prompts, [])
    together = greedy([text[300 * i : 300 * i + PROMPT_LEN - 50 * i] for i in range(16)], NEW_TOKENS, flush=True)
    for i, sampling in enumerate(together["sampling_params"]):
        sampling |= {"sampling_seed": i} | KINDS[i % len(KINDS)]
    alone = [
        together | {name: [together[name][i]] for name in ("input_ids", "sampling_params")} for i in range(NUM_REQUESTS)
    ]
    config = tiny(f"deterministic-{backend}", "trees", attention_backend=backend, **FLAGS)
    *by_itself, first, second = engines.ask(config, [*alone, together, together])

    described = engines.describe(config)
    # It excludes trees.
    assert described["worker"] == "DFlashWorker" and described["verified_as"] == "chains"
    assert described["draft_attention_backend"] == backend
    # A prompt from the cache is rounded otherwise, without DFLASH too.
    assert not any(
        answer["meta_info"]["cached_tokens"] for answers in (*by_itself, first, second) for answer in answers
    )
    partings = [first_difference(want, got) for [want], got in zip(by_itself, first)]
    print(f"\n{backend}: alone and beside others part at {partings}, {tokens_per_cycle(first):.2f} per cycle")
    assert partings == [None] * NUM_REQUESTS
    assert [first_difference(*pair) for pair in zip(first, second)] == [None] * 16
