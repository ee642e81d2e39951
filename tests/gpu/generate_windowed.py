"""Generate from the windowed pair in an Engine in its own process, and write the results as JSON.

usage: generate_windowed.py FOLDER BACKEND dflash|none OUTPUT

FOLDER has `target/` and `drafter/`, written by `windowed.write_windowed_pair`.
"""

import json
import sys
from pathlib import Path

# Tokens of the target's vocabulary of 16.
PROMPTS = [[2 + (start + 7 * i + i * i // 5) % 14 for i in range(length)] for start, length in enumerate([5, 60, 130])]
SAMPLING = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
LONG_ANSWER = "--- long answer ---"


def main(folder: str, backend: str, mode: str, output: str) -> None:
    # Imported here because the process of the tests imports the prompts from this module.
    import sglang

    dflash = {
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(Path(folder) / "drafter"),
        "speculative_eagle_topk": 1,
    }
    engine = sglang.Engine(
        model_path=str(Path(folder) / "target"),
        dtype="bfloat16",
        attention_backend=backend,
        max_total_tokens=20_000,
        mem_fraction_static=0.98,
        max_running_requests=8,
        cuda_graph_bs_decode=[1, 2, 4],
        disable_prefill_cuda_graph=True,
        skip_tokenizer_init=True,
        skip_server_warmup=True,
        # The pool of the sliding layers is a small part of the other pool.
        swa_full_tokens_ratio=0.1,
        log_level="info",
        decode_log_interval=5,
        **(dflash if mode == "dflash" else {}),
    )
    options = {} if mode == "dflash" else {"return_logprob": True, "top_logprobs_num": 2}
    answers = engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING, **options)
    # From here on the scheduler's log is about one long answer.
    print(LONG_ANSWER, file=sys.stderr, flush=True)
    engine.generate(input_ids=PROMPTS[1], sampling_params=SAMPLING | {"max_new_tokens": 900})
    described = engine.get_server_info()["internal_states"][0].get("sglang_dflash")
    engine.shutdown()
    results = [
        {
            "output_ids": answer["output_ids"],
            "top2": [[entry[0] for entry in best] for best in answer["meta_info"].get("output_top_logprobs", [])],
        }
        for answer in answers
    ]
    Path(output).write_text(json.dumps({"worker": described, "results": results}))


if __name__ == "__main__":
    main(*sys.argv[1:])
