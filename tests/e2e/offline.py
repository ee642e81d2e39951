"""Generate with the offline Engine, and write the results as JSON.

It is a program because SGLang keeps state per process.
usage: offline.py REQUEST RESULT

REQUEST is a JSON file with `input_ids`, `sampling_params`, `engine` (the Engine's arguments) and `dflash` (true or
false).
"""

import json
import sys
from pathlib import Path

import sglang

from models.tiny import DRAFTER_DIR, TARGET_DIR


def run(request: dict) -> dict:
    speculation = {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(DRAFTER_DIR)}
    engine = sglang.Engine(
        model_path=str(TARGET_DIR),
        dtype="float32",
        **(speculation if request["dflash"] else {}),
        **request["engine"],
    )
    try:
        input_ids, sampling_params = request["input_ids"], request["sampling_params"]
        return {
            "internal_state": engine.get_server_info()["internal_states"][0],
            "answers": engine.generate(input_ids=input_ids, sampling_params=sampling_params),
            "streamed": list(engine.generate(input_ids=input_ids[0], sampling_params=sampling_params, stream=True)),
        }
    finally:
        engine.shutdown()


if __name__ == "__main__":
    result = run(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result, default=str))
