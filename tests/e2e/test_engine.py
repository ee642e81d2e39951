"""The offline Engine: batches and streams of token ids, without a tokenizer."""

import json
from pathlib import Path

import pytest
from oracle import assert_same_cycles
from serving import DEVICE_FLAGS, ENV, assert_same_answers
from support import processes

SCRIPT = Path(__file__).with_name("offline.py")
MAX_NEW_TOKENS = 80


@pytest.fixture(scope="module")
def results(tmp_path_factory, prompts):
    """Results of `offline.py` with DFLASH, started as users start it, and without."""
    request = {
        "input_ids": prompts[:12],
        "sampling_params": {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS},
        "engine": {flag.replace("-", "_"): value for flag, value in DEVICE_FLAGS.items()}
        | {"max_total_tokens": 8000, "max_running_requests": 6, "skip_tokenizer_init": True},
    }
    results = {}
    for name in ("dflash", "plain"):
        dflash, folder = name == "dflash", tmp_path_factory.mktemp(name)
        files = folder / "request.json", folder / "result.json"
        files[0].write_text(json.dumps(request | {"dflash": dflash}))
        status, _, stderr = processes.run([str(SCRIPT), *map(str, files)], ENV, folder, spawn=dflash, timeout=240)
        assert status == 0, stderr[-5000:]
        results[name] = json.loads(files[1].read_text())
    return results


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
