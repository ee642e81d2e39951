"""`--enable-deterministic-inference` with seeds gives the same tokens in every batch, on every backend."""

import pytest
from support.engine_process import run
from support.ties import first_difference

from models.tiny import DRAFTER_DIR, TARGET_DIR

ENGINE = {
    "model_path": str(TARGET_DIR),
    "speculative_algorithm": "DFLASH",
    "speculative_draft_model_path": str(DRAFTER_DIR),
    "dtype": "bfloat16",
    "enable_deterministic_inference": True,
    "max_total_tokens": 40_000,
    "max_running_requests": 16,
    # Prompts are prefilled whole, alone and with others.
    "chunked_prefill_size": 32_768,
    "mem_fraction_static": 0.98,
    "cuda_graph_bs_decode": [1, 4, 16],
    "disable_prefill_cuda_graph": True,
    "skip_server_warmup": True,
}
NUM_REQUESTS, NEW_TOKENS = 4, 200
# With this many tokens, FlashInfer would split the KV of 16 requests differently than the KV of one.
PROMPT_LEN = 1400
KINDS = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0},
]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fa3", "flashinfer", "triton"])
def test_alone_and_beside_others(backend, prompts, tmp_path):
    text = sum(prompts, [])
    inputs = [text[300 * i : 300 * i + PROMPT_LEN - 50 * i] for i in range(16)]
    sampling = [
        {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "sampling_seed": i} | KINDS[i % len(KINDS)]
        for i in range(16)
    ]
    alone = [{"input_ids": [inputs[i]], "sampling_params": [sampling[i]], "flush": True} for i in range(NUM_REQUESTS)]
    together = {"input_ids": inputs, "sampling_params": sampling, "flush": True}
    answers, described = run(tmp_path, ENGINE | {"attention_backend": backend}, [*alone, together, together])

    assert described["worker"] == "DFlashWorker" and described["draft_attention_backend"] == backend
    *by_itself, first, second = answers
    partings = [first_difference(want, got) for [want], got in zip(by_itself, first)]
    cycles = sum(answer["meta_info"]["spec_verify_ct"] for answer in first)
    print(f"\n{backend}: alone and beside others part at {partings}, {16 * (NEW_TOKENS - 1) / cycles:.2f} per cycle")
    assert partings == [None] * NUM_REQUESTS
    assert [first_difference(*pair) for pair in zip(first, second)] == [None] * 16
