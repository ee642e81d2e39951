"""Scheduling of running requests on fa3 and flashinfer in bf16: the text is the target's own.

Prompts are prefilled in chunks, some from the radix cache. Requests are retracted every few steps, aborted, or run into
the context limit while others continue. One Engine with DFLASH goes through all of it. One without speculation answers
the same requests undisturbed.
"""

import pytest
from support.engine_process import run
from support.ties import describe_difference, first_difference

from models.tiny import DRAFTER_DIR, TARGET_DIR

# Not a multiple of any page size below, nor of any kernel's tile.
CONTEXT = 601
ENGINE = {
    "model_path": str(TARGET_DIR),
    "dtype": "bfloat16",
    "context_length": CONTEXT,
    "max_total_tokens": 20_000,
    "max_running_requests": 8,
    "mem_fraction_static": 0.98,
    "cuda_graph_bs_decode": [1, 2, 4, 8],
    "disable_prefill_cuda_graph": True,
    "skip_server_warmup": True,
}
DFLASH = {
    "speculative_algorithm": "DFLASH",
    "speculative_eagle_topk": 1,
    "speculative_draft_model_path": str(DRAFTER_DIR),
    "chunked_prefill_size": 128,
}
DISTURBED = {
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "11",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
}
# As in test_tiny_pair.py.
TIE = 0.25


def calls(prompts: list[list[int]]) -> dict[str, dict]:
    """Return arguments of `Engine.generate` by purpose; 8 requests each."""
    text = sum(prompts, [])

    def call(inputs: list[list[int]], new_tokens: list[int]) -> dict:
        sampling = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in new_tokens]
        return {"input_ids": inputs, "sampling_params": sampling}

    some = prompts[:8]
    long = [text[500 * i : 500 * i + 480 + 7 * i] for i in range(4)]
    return {
        "several at once": call(some, [100 - 8 * i for i in range(8)]),
        # Their prompts and the first answers are in the radix cache by now.
        "again": call([[*prompt, 300 + i] for i, prompt in enumerate(some)], [60] * 8),
        "in chunks": call([*long, *prompts[8:12]], [40] * 8),
        # Long requests end at the context limit at the same time, and short ones continue.
        "to the limit": call([*long, *prompts[12:16]], [CONTEXT - len(p) for p in long] + [200] * 4),
        "beside aborted ones": call(prompts[16:24], [150] * 8),
    }


ABORTED = [1, 2, 5]


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "page_size"), [("fa3", 1), ("fa3", 64), ("flashinfer", 1), ("flashinfer", 16)])
def test_text(backend, page_size, shared, prompts, tmp_path):
    asked, flags = calls(prompts), ENGINE | {"attention_backend": backend}
    best_two = {"return_logprob": True, "top_logprobs_num": 2}
    plain = shared.get(
        f"features-{backend}", lambda: run(tmp_path, flags, [call | best_two for call in asked.values()])[0]
    )
    asked["beside aborted ones"]["abort"] = ABORTED
    answers, described = run(tmp_path, flags | DFLASH | {"page_size": page_size}, list(asked.values()), DISTURBED)
    assert described["worker"] == "DFlashWorker"

    retractions, partings = 0, []
    for name, of_plain, of_dflash in zip(asked, plain, answers):
        same, is_aborted = 0, set(ABORTED) if name == "beside aborted ones" else set()
        for i, (want, got) in enumerate(zip(of_plain, of_dflash)):
            reason = got["meta_info"]["finish_reason"]["type"]
            assert reason == ("abort" if i in is_aborted else "length"), name
            assert i in is_aborted or len(got["output_ids"]) == len(want["output_ids"])
            retractions += got["meta_info"].get("num_retractions", 0)
            differs = first_difference(want, got)
            same += differs is None
            if differs is not None:
                best, second = (entry[0] for entry in want["meta_info"]["output_top_logprobs"][differs][:2])
                partings.append((best - second, f"{name}, request {i} {describe_difference(want, got)}"))
        cycles = sum(got["meta_info"]["spec_verify_ct"] for got in of_dflash)
        tokens = sum(len(got["output_ids"]) - 1 for got in of_dflash)
        cached = sum(got["meta_info"]["cached_tokens"] for got in of_dflash)
        print(
            f"\n{backend}, page {page_size}, {name}: {same} of {len(of_plain)} identical, {tokens / cycles:.2f} tokens "
            f"per cycle, {cached} prompt tokens from the cache"
        )
        assert name != "again" or cached > 0
    print(f"{retractions} retractions; partings: {[what for _, what in partings]}")
    assert retractions > 0
    assert [what for gap, what in partings if gap > TIE] == []
