"""The offline Engine: batches and streams of token ids, without a tokenizer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from oracle import assert_same_cycles
from serving import DEVICE_FLAGS, ENV, assert_same_answers, end_process_group

SCRIPT = Path(__file__).with_name("offline.py")
MAX_NEW_TOKENS = 80


@pytest.fixture(scope="module")
def results(tmp_path_factory, prompts):
    """What `offline.py` writes."""
    folder = tmp_path_factory.mktemp("offline")
    request = {
        "input_ids": prompts[:12],
        "sampling_params": {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS},
        "engine": {flag.replace("-", "_"): value for flag, value in DEVICE_FLAGS.items()}
        | {"max_total_tokens": 8000, "max_running_requests": 6, "skip_tokenizer_init": True},
    }
    (folder / "request.json").write_text(json.dumps(request))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, SCRIPT, folder / "request.json", folder / "result.json"],
            env=os.environ | ENV,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=240)
        finally:
            end_process_group(process)
    assert status == 0, (folder / "log").read_text(errors="replace")[-5000:]
    return json.loads((folder / "result.json").read_text())


def test_our_worker_serves(results):
    assert results["dflash"]["internal_state"]["sglang_dflash"]["worker"] == "DFlashWorker"
    assert "sglang_dflash" not in results["plain"]["internal_state"]


def test_batch(results, prompts, oracle):
    assert_same_answers(results["dflash"]["answers"], results["plain"]["answers"])
    for prompt, answer in zip(prompts, results["dflash"]["answers"]):
        assert_same_cycles(answer, oracle.generate(prompt, MAX_NEW_TOKENS))


def test_stream(results):
    assert_same_answers(results["dflash"]["streamed"][-1], results["plain"]["answers"][0])
    assert len(results["dflash"]["streamed"]) < len(results["plain"]["streamed"])
