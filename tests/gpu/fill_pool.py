"""Fill an Engine's KV pool with running requests until no slot is left for the next token, and write the results.

usage: fill_pool.py ENGINE SHARES KINDS OUTPUT
    ENGINE: JSON object with `sglang.Engine`'s arguments.
    SHARES: JSON list of two: the parts of a running request's share of the pool that its prompt and its answer take.
    KINDS: JSON list of rounds. A round lists sampling parameters (or `return_logprob`) that its requests get in turn.
    OUTPUT: name of the output. When a round has ended, a file exists with the round's number appended to the name.
"""

import json
import random
import sys
import time
from pathlib import Path

import sglang

# Tokens of the prompts, which any target has.
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
    # The last cycle, which was launched ahead, may still run; `Engine.flush_cache` does not wait for it.
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
