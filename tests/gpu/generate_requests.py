"""Answer requests of every kind in one batch, from the tiny pair in an Engine in its own process, and write JSON.

usage: generate_requests.py greedy|seeded dflash|plain OUTPUT
"""

import json
import sys

import sglang
from sglang.srt.sampling.custom_logit_processor import DeepseekOCRNoRepeatNGramLogitProcessor
from transformers import AutoTokenizer

from models.tiny import DRAFTER_DIR, TARGET_DIR, load_prompts

# Requests whose grammar ends have no `ignore_eos`: without speculation SGLang would write a token past the grammar.
KINDS = {
    "greedy": [
        {},
        {"frequency_penalty": 0.7},
        {"presence_penalty": 0.9},
        {"repetition_penalty": 1.4},
        {"min_new_tokens": 40, "stop_token_ids": [200], "ignore_eos": False},
        {"logit_bias": {"263": 4.0, "200": -100}},
        {"custom_params": {"ngram_size": 3, "window_size": 100}},
        {"regex": r"(def [a-z]+\(\):\n    return [a-z]+\n)+", "ignore_eos": False},
    ],
    "seeded": [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "presence_penalty": 0.5},
    ],
}
NUM_REQUESTS, NEW_TOKENS = 32, 60


def main(kind: str, mode: str, output: str) -> None:
    dflash = {
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(DRAFTER_DIR),
        "speculative_eagle_topk": 1,
    }
    # Without speculation, overlap scheduling would apply penalties one token late.
    plain = {"disable_overlap_schedule": True}
    engine = sglang.Engine(
        model_path=str(TARGET_DIR),
        # On CUDA, SGLang's norms take float32 only under deterministic inference.
        dtype="float32" if kind == "seeded" else "bfloat16",
        attention_backend="triton",
        max_total_tokens=20_000,
        # The token limit bounds SGLang's memory; other tests may use the rest of the GPU.
        mem_fraction_static=0.98,
        max_running_requests=NUM_REQUESTS,
        cuda_graph_bs_decode=[8, 16, 32],
        disable_prefill_cuda_graph=True,
        enable_custom_logit_processor=True,
        enable_deterministic_inference=kind == "seeded",
        log_level="warning",
        **(dflash if mode == "dflash" else plain),
    )
    server_info = engine.get_server_info()["internal_states"][0]
    tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR)
    kinds = [KINDS[kind][i % len(KINDS[kind])] for i in range(NUM_REQUESTS)]
    # Without speculation, a seeded sample depends on whether another request of the batch has a filter.
    num_batches = len(KINDS[kind]) if mode == "plain" and kind == "seeded" else 1
    outputs = [{}] * NUM_REQUESTS
    for first in range(num_batches):
        chosen = range(first, NUM_REQUESTS, num_batches)
        outputs[first::num_batches] = engine.generate(
            input_ids=[tokenizer(load_prompts()[i])["input_ids"] for i in chosen],
            sampling_params=[
                {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, "sampling_seed": i} | kinds[i]
                for i in chosen
            ],
            custom_logit_processor=[
                DeepseekOCRNoRepeatNGramLogitProcessor.to_str() if "custom_params" in kinds[i] else None for i in chosen
            ],
            return_logprob=True,
            top_logprobs_num=2,
        )
    engine.shutdown()
    results = [
        {
            "output_ids": out["output_ids"],
            "verify_ct": out["meta_info"].get("spec_verify_ct"),
            "logprobs": [entry[0] for entry in out["meta_info"]["output_token_logprobs"]],
            "top2": [[entry[0] for entry in best] for best in out["meta_info"]["output_top_logprobs"]],
        }
        for out in outputs
    ]
    with open(output, "w") as f:
        json.dump({"worker": server_info.get("sglang_dflash"), "results": results}, f)


if __name__ == "__main__":
    main(*sys.argv[1:4])
