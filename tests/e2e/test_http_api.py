"""The HTTP API: streams, the OpenAI routes, and requests that DFLASH refuses."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from oracle import assert_same_cycles
from safetensors.torch import load_file, save_file
from serving import DEFAULT, assert_same_answers

from models.tiny import DRAFTER_DIR, TARGET_DIR

pytestmark = pytest.mark.parametrize("settings", [DEFAULT], indirect=True, ids=str)

QUESTION = "def fibonacci(n):\n"
MESSAGES = {"messages": [{"role": "user", "content": QUESTION}]}


def test_stream_adds_up_to_the_whole_answer(pair, prompts):
    whole = pair.plain.generate(prompts[9], max_new_tokens=80)

    chunks = list(pair.dflash.stream(prompts[9], max_new_tokens=80))

    assert len(chunks) > 3
    for before, after in zip(chunks, chunks[1:]):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert after["text"].startswith(before["text"])
    assert_same_answers(chunks[-1], whole)


def test_streams_side_by_side(pair, prompts):
    whole = pair.plain.generate(prompts[12:15], max_new_tokens=60)

    streams = [pair.dflash.stream(prompt, max_new_tokens=60) for prompt in prompts[12:15]]
    first = [next(stream) for stream in streams]
    last = [list(stream)[-1] for stream in streams]

    assert [chunk["output_ids"] for chunk in first] == [
        answer["output_ids"][: len(chunk["output_ids"])] for chunk, answer in zip(first, whole)
    ]
    assert_same_answers(last, whole)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": QUESTION}), ("/v1/chat/completions", MESSAGES)]
)
def test_openai_routes(pair, path, body):
    body = {"model": "tiny", "temperature": 0, "max_tokens": 64, "stop": ["\n\n\n\n"]} | body

    dflash, plain = pair.ask(lambda server: server.post(path, body))

    def content(choice):
        return choice["text"] if "text" in choice else choice["message"]["content"]

    assert len(content(dflash["choices"][0])) > 60
    assert content(dflash["choices"][0]) == content(plain["choices"][0])
    assert dflash["choices"][0]["finish_reason"] == plain["choices"][0]["finish_reason"]
    assert dflash["usage"] == plain["usage"]

    streamed = ""
    for chunk in pair.dflash.post_stream(path, body | {"stream": True}):
        choice = chunk["choices"][0]
        streamed += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    assert streamed == content(dflash["choices"][0])


def test_responses(pair):
    """SGLang takes the served model's name only, and writes some tokens less than in a chat."""
    body = {"model": str(TARGET_DIR), "input": QUESTION, "temperature": 0, "max_output_tokens": 64}

    dflash, plain = pair.ask(lambda server: server.post("/v1/responses", body))

    def content(response):
        (message,) = response["output"]
        return message["content"][0]["text"]

    assert len(content(dflash)) > 60
    assert content(dflash) == content(plain)
    assert dflash["status"] == plain["status"]
    assert dflash["usage"] == plain["usage"]
    chat = pair.dflash.post("/v1/chat/completions", MESSAGES | {"model": "tiny", "temperature": 0, "max_tokens": 64})
    assert chat["choices"][0]["message"]["content"].startswith(content(dflash))

    streamed = "".join(
        chunk["delta"]
        for chunk in pair.dflash.post_stream("/v1/responses", body | {"stream": True})
        if chunk["type"] == "response.output_text.delta"
    )
    assert streamed == content(dflash)
    refused = pair.dflash.try_post("/v1/responses", body | {"model": "tiny"})
    assert refused.status_code == 404
    assert "'tiny' does not exist" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": QUESTION}), ("/v1/chat/completions", MESSAGES)]
)
def test_acceptance_in_openai_answers(pair, path, body):
    """In the fields that docs/metrics.md names."""
    body = {"model": "tiny", "temperature": 0, "max_tokens": 64, "return_spec_tokens_details": True} | body

    details = pair.dflash.post(path, body)["sglext"]["spec_tokens_details"]
    several = pair.dflash.post(path, body | {"n": 2})["sglext"]["spec_tokens_details"]
    streamed = [chunk for chunk in pair.dflash.post_stream(path, body | {"stream": True}) if chunk.get("sglext")]

    assert 0 < details["spec_verify_ct"] < 63
    assert details["spec_num_correct_drafts"] > 0
    assert sum(details["spec_correct_drafts_histogram"]) == details["spec_verify_ct"]
    assert several == [details] * 2
    assert [chunk["sglext"]["spec_tokens_details"] for chunk in streamed] == [details]


def test_meta_info_of_a_chat(pair):
    body = MESSAGES | {"model": "tiny", "temperature": 0, "max_tokens": 64, "return_meta_info": True}

    meta_info = pair.dflash.post("/v1/chat/completions", body)["choices"][0]["meta_info"]

    assert 0 < meta_info["spec_verify_ct"] < 63
    assert meta_info["spec_accept_length"] > 1


def test_refused_requests_do_not_disturb_the_batch(pair, prompts):
    requests = [{"input_ids": prompt, "max_new_tokens": 100, "ignore_eos": True} for prompt in prompts[:6]]
    bad = {"text": QUESTION, "sampling_params": {"temperature": 0}, "return_routed_experts": True}

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(pair.dflash.generate_concurrently, requests)
        refused = [pair.dflash.try_post("/generate", bad) for _ in range(8)]
        answers = running.result()

    assert [response.status_code for response in refused] == [400] * 8
    assert all("return_routed_experts" in response.json()["error"]["message"] for response in refused)
    assert_same_answers(answers, pair.plain.generate_concurrently(requests))


def test_updating_the_targets_weights_keeps_the_drafter(pair, prompts, oracle):
    answer = pair.dflash.post("/update_weights_from_disk", {"model_path": str(TARGET_DIR)})

    assert answer["success"], answer["message"]
    assert_same_cycles(pair.dflash.generate(prompts[2], max_new_tokens=64), oracle.generate(prompts[2], 64))


def test_updating_the_drafters_weights(pair, prompts, oracle, tmp_path):
    """A worse drafter drafts worse, and the text stays; then the good one comes back."""
    worse = tmp_path / "worse"
    shutil.copytree(DRAFTER_DIR, worse)
    tensors = load_file(worse / "model.safetensors")
    save_file({name: tensor * 0.5 for name, tensor in tensors.items()}, worse / "model.safetensors")
    expected = oracle.generate(prompts[2], 64)

    answer = pair.dflash.post("/update_weights_from_disk", {"model_path": str(worse)})
    assert answer["success"], answer["message"]
    by_worse = pair.lossless(lambda server: server.generate(prompts[2], max_new_tokens=64))
    # Which waits for the step behind the answer; an update does not.
    pair.dflash.flush_cache()
    answer = pair.dflash.post("/update_weights_from_disk", {"model_path": str(DRAFTER_DIR)})
    assert answer["success"], answer["message"]

    assert by_worse["meta_info"]["spec_verify_ct"] > 1.2 * len(expected.accept_lengths)
    assert_same_cycles(pair.dflash.generate(prompts[2], max_new_tokens=64), expected)


def test_a_drafter_of_another_shape_is_refused(pair, prompts, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(DRAFTER_DIR, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))

    refused = pair.dflash.try_post("/update_weights_from_disk", {"model_path": str(other)})

    assert refused.status_code == 400
    assert "intermediate_size=96" in refused.json()["message"]
    pair.lossless(lambda server: server.generate(prompts[2], max_new_tokens=64))


@pytest.mark.parametrize("checkpoint", [TARGET_DIR, DRAFTER_DIR], ids=["target", "drafter"])
def test_graphs_are_not_captured_again(pair, prompts, checkpoint):
    """The worker replays those that it has."""
    body = {"model_path": str(checkpoint), "recapture_cuda_graph": True}

    refused = pair.dflash.try_post("/update_weights_from_disk", body)

    assert refused.status_code == 400
    assert "recapture_cuda_graph=true" in refused.json()["message"]
    pair.lossless(lambda server: server.generate(prompts[2], max_new_tokens=64))
