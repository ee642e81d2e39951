"""Fill an Engine's KV pool with running requests until none is left for the next token, and write what came of it.

usage: fill_pool.py ENGINE SHARES KINDS OUTPUT; ENGINE is a JSON object of `sglang.Engine`'s arguments. SHARES is a JSON
list of two: of what each running request could have of the pool, the parts that a prompt and its answer take. KINDS is
a JSON list of rounds: of each, sampling parameters (or `return_logprob`) that its requests get in turn. When a round
has ended, a file with its number behind OUTPUT's name is there.
"""

import json
import random
import sys
import time
from pathlib import Path

import sglang

# Of the prompts; any target has them.
VOCAB_SIZE = 1000


def main(arguments: str, shares: str, kinds: str, output: str) -> None:
    engine = sglang.Engine(log_level="warning", **json.loads(arguments))
    state = engine.get_server_info()["internal_states"][0]
    described, running = state["sglang_dflash"], state["effective_max_running_requests_per_dp"]
    share = described["kv_capacity_tokens"] // running
    prompt_len, new_tokens = (int(part * share) for part in json.loads(shares))
    draw, num_requests = random.Random(0), running + running // 4
    rounds = []
    for number, of_round in enumerate(json.loads(kinds)):
        each = [of_round[i % len(of_round)] for i in range(num_requests)]
        rounds.append(
            engine.generate(
                input_ids=[draw.choices(range(1, VOCAB_SIZE), k=prompt_len) for _ in each],
                sampling_params=[
                    {"max_new_tokens": new_tokens}
                    | {name: value for name, value in kind.items() if name != "return_logprob"}
                    for kind in each
                ],
                return_logprob=[kind.get("return_logprob", False) for kind in each],
                top_logprobs_num=[5 if kind.get("return_logprob") else 0 for kind in each],
            )
        )
        Path(f"{output}.{number}").touch()
    # The cycle that was launched ahead of the last answer's end may still run: `Engine.flush_cache` gives up.
    assert engine.loop.run_until_complete(engine.tokenizer_manager.flush_cache(timeout_s=60)).success
    deadline, used = time.monotonic() + 15, None
    while used != 0 and time.monotonic() < deadline:
        time.sleep(0.2)
        [load] = engine.loop.run_until_complete(engine.tokenizer_manager.get_loads())
        used = load.num_used_tokens
    engine.shutdown()
    result = {
        "described": described,
        "running": running,
        "new_tokens": new_tokens,
        "rounds": [
            {
                "finished": [answer["meta_info"]["finish_reason"] for answer in answers],
                "output_lens": [len(answer["output_ids"]) for answer in answers],
                "num_logprobs": [len(answer["meta_info"].get("output_token_logprobs", ())) for answer in answers],
                "num_retractions": sum(answer["meta_info"]["num_retractions"] for answer in answers),
            }
            for answers in rounds
        ],
        "used_afterwards": used,
    }
    Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
