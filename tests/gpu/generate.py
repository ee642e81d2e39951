"""Generate from a shipped pair in an Engine in its own process, and write the results as JSON.

usage: generate.py BACKEND DRAFT_BACKEND OUTPUT [--pair hybrid] [--varied-lengths] [--sampled] [--draft-window TOKENS]
    [--kv-cache-dtype DTYPE] [--adaptive] [--prefill-graphs BACKEND]

DRAFT_BACKEND `none` disables speculation. BACKEND `default` leaves every flag of a server at its default.
"""

import argparse
import json

import sglang
from transformers import AutoTokenizer

from models import hybrid, tiny

PAIRS = {"tiny": tiny, "hybrid": hybrid}
# State slots of the hybrid target. By default SGLang would give states most of the memory.
STATES = {"tiny": {}, "hybrid": {"max_mamba_cache_size": 100}}
NEW_TOKENS = 128


def main(
    backend: str,
    draft_backend: str,
    output: str,
    pair: str,
    varied_lengths: bool,
    sampled: bool,
    draft_window: int | None,
    kv_cache_dtype: str,
    adaptive: bool,
    prefill_graphs: str,
) -> None:
    dflash = {
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(PAIRS[pair].DRAFTER_DIR),
        "speculative_draft_attention_backend": None if draft_backend == "default" else draft_backend,
        "speculative_draft_window_size": draft_window,
        "speculative_adaptive": adaptive,
        "speculative_eagle_topk": None if draft_backend == "default" else 1,
    }
    flags = {
        "attention_backend": backend,
        "kv_cache_dtype": kv_cache_dtype,
        "max_total_tokens": 60_000,
        "mem_fraction_static": 0.98,
        "max_running_requests": 64,
        "cuda_graph_bs_decode": [1, 2, 4, 8],
        "cuda_graph_backend_prefill": prefill_graphs,
        "cuda_graph_bs_prefill": [64, 128, 256, 512, 1024, 2048],
    }
    engine = sglang.Engine(
        model_path=str(PAIRS[pair].TARGET_DIR),
        log_level="warning",
        skip_server_warmup=True,
        **({} if backend == "default" else flags | STATES[pair]),
        **({} if draft_backend == "none" else dflash),
    )
    tokenizer = AutoTokenizer.from_pretrained(PAIRS[pair].TARGET_DIR)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in tiny.load_prompts()]
    drawn = {"temperature": 0.8, "top_k": 40, "top_p": 0.95} if sampled else {}
    sampling = [
        # Requests that end at different times give the running batch every size.
        {"temperature": 0, "max_new_tokens": 16 * (1 + i % 8) if varied_lengths else NEW_TOKENS, "ignore_eos": True}
        | (drawn if i % 2 else {})
        for i in range(len(prompts))
    ]
    options = {"return_logprob": True, "top_logprobs_num": 2} if draft_backend == "none" else {}
    outputs = []
    for start in range(0, len(prompts), 8):
        rows = slice(start, start + 8)
        outputs += engine.generate(input_ids=prompts[rows], sampling_params=sampling[rows], **options)
    server_info = engine.get_server_info()["internal_states"][0]
    engine.shutdown()
    results = [
        {
            "output_ids": out["output_ids"],
            "verify_ct": out["meta_info"].get("spec_verify_ct"),
            # (log probability, token id, text) of the best two tokens at every position.
            "top2": [[entry[0] for entry in best] for best in out["meta_info"].get("output_top_logprobs", [])],
        }
        for out in outputs
    ]
    with open(output, "w") as f:
        json.dump({"worker": server_info.get("sglang_dflash"), "results": results}, f)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("backend", "draft_backend", "output"):
        parser.add_argument(name)
    parser.add_argument("--pair", choices=PAIRS, default="tiny")
    parser.add_argument("--varied-lengths", action="store_true")
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--draft-window", type=int)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--adaptive", action="store_true")
    parser.add_argument("--prefill-graphs", default="disabled")
    main(**vars(parser.parse_args()))
