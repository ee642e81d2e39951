"""LoRA adapters in CUDA graphs and bf16: the text is the one without speculation, up to ties.

Five and three requests are replayed in graphs of eight and four, so that padding follows requests with adapters.
"""

import pytest
from support.adapters import ATTENTION, LAYERS, VOCABULARY, adapter
from support.engine_process import run
from support.ties import describe_difference, first_difference

from models.tiny import DRAFTER_DIR, TARGET_DIR

ADAPTERS = {"red": ATTENTION, "green": LAYERS, "blue": (*LAYERS, *VOCABULARY)}
ENGINE = {
    "model_path": str(TARGET_DIR),
    "dtype": "bfloat16",
    "attention_backend": "fa3",
    "lora_paths": [f"{name}={adapter(f'{name}-{len(names)}', names)}" for name, names in ADAPTERS.items()],
    # One less than there are with the requests without an adapter, so that adapters are evicted.
    "max_loras_per_batch": 3,
    "chunked_prefill_size": 128,
    "max_total_tokens": 20_000,
    "max_running_requests": 8,
    "mem_fraction_static": 0.98,
    "cuda_graph_bs_decode": [1, 2, 4, 8],
    "disable_prefill_cuda_graph": True,
    "skip_server_warmup": True,
}
DFLASH = {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(DRAFTER_DIR)}
NEW_TOKENS = 60
# As in test_tiny_pair.py.
TIE = 0.25


def calls(prompts: list[list[int]]) -> list[dict]:
    """Return arguments of `Engine.generate`: different adapters and none in one batch."""

    def call(inputs: list[list[int]], adapters: list[str | None]) -> dict:
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        best_two = {"return_logprob": True, "top_logprobs_num": 2}
        return {"input_ids": inputs, "lora_path": adapters, "sampling_params": sampling} | best_two

    return [
        call(prompts[:5], [None, "red", "green", None, "red"]),
        call([sum(prompts[5:8], []), prompts[8], prompts[9]], ["blue", None, "green"]),
        # The prompts of the first call again, with other adapters.
        call(prompts[:5], ["green", None, "blue", "blue", "green"]),
        call(prompts[10:18], [None, "red", "green", "blue"] * 2),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("topk", [1, 8])
@pytest.mark.parametrize("backend", ["csgmv", "triton"])
def test_text(backend, topk, shared, prompts, tmp_path):
    flags = ENGINE | {"lora_backend": backend}
    plain = shared.get(f"lora-{backend}", lambda: run(tmp_path, flags, calls(prompts))[0])
    answers, described = run(tmp_path, flags | DFLASH | {"speculative_eagle_topk": topk}, calls(prompts))
    assert described["worker"] == "DFlashWorker"
    assert described["candidates_per_position"] == topk

    partings, same, num_cycles, num_tokens = [], 0, 0, 0
    for asked, of_plain, of_dflash in zip(calls(prompts), plain, answers):
        for name, want, got in zip(asked["lora_path"], of_plain, of_dflash):
            assert len(got["output_ids"]) == len(want["output_ids"])
            assert got["meta_info"]["cached_tokens"] <= 1, "another adapter's KV"
            num_cycles += got["meta_info"]["spec_verify_ct"] if name is None else 0
            num_tokens += NEW_TOKENS - 1 if name is None else 0
            differs = first_difference(want, got)
            same += differs is None
            if differs is not None:
                best, second = (entry[0] for entry in want["meta_info"]["output_top_logprobs"][differs][:2])
                partings.append((best - second, f"{name} {describe_difference(want, got)}"))
    print(
        f"\n{backend}, topk {topk}: {same} identical, {num_tokens / num_cycles:.2f} tokens per cycle without adapters"
    )
    print(f"partings: {[what for _, what in partings]}")
    assert [what for gap, what in partings if gap > TIE] == []
    assert num_tokens > 1.5 * num_cycles
