"""Bad requests to a real DFLASH server get a 4xx that says why, and do not disturb the next request."""

from __future__ import annotations

import base64
import dataclasses
import pickle
import sys
from pathlib import Path

import msgspec
import pytest
import requests
import torch
from safetensors.torch import load_file
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from models.tiny import DRAFTER_DIR, TARGET_DIR
from sglang_dflash.requests.validate import (
    BY_SAMPLER,
    BY_SGLANG,
    INTERNAL,
    REFUSED_OUTPUTS,
    REFUSED_PARAMS,
    REFUSED_POSITIONS,
)

sys.path.append(str(Path(__file__).parents[1] / "e2e"))
from serving import Server, Settings

VOCAB_SIZE = 1024
GREEDY = {"temperature": 0, "max_new_tokens": 24}
GOOD = {"text": "    def has_header(self, sample):\n", "sampling_params": GREEDY}
# SGLang lets such requests through only if both are asked for.
SETTINGS = Settings("requests", flags=(("enable-custom-logit-processor", True), ("enable-return-hidden-states", True)))


def test_every_sampling_parameter_is_classified():
    classified = [*BY_SGLANG, *BY_SAMPLER, *REFUSED_PARAMS, *INTERNAL]
    assert len(set(classified)) == len(classified)
    assert set(classified) == {field.name for field in msgspec.structs.fields(SamplingParams)}


def test_refused_outputs_exist():
    assert set(REFUSED_OUTPUTS) <= {field.name for field in dataclasses.fields(GenerateReqInput)}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if torch.cuda.is_available():
        pytest.skip("serves on the CPU")
    server = Server(SETTINGS, True, tmp_path_factory.mktemp("requests") / "server.log")
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def post(server: Server, path: str, **content) -> requests.Response:
    # A new connection, because SGLang's 500s close theirs.
    with requests.Session() as http:
        http.trust_env = False
        return http.post(f"{server._url}{path}", timeout=120, **content)


def text_of(server: Server, body: dict) -> str:
    response = post(server, "/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()["text"]


@pytest.fixture(scope="module")
def good_text(server):
    return text_of(server, GOOD)


@pytest.fixture
def undisturbed(server, good_text):
    """Check after the test that the next good request gets its usual answer."""
    yield
    assert text_of(server, GOOD) == good_text


@pytest.mark.parametrize("prompt", [{"input_ids": [5] * 300}, {"text": "x = 1\n" * 100}])
def test_many_answers_to_one_prompt(server, prompt):
    """The prompt may have any length."""
    response = post(server, "/generate", json=prompt | {"sampling_params": GREEDY | {"n": 17, "max_new_tokens": 2}})
    assert response.status_code == 200, response.text
    assert len(response.json()) == 17


def sampling(**params) -> dict:
    return {"text": GOOD["text"], "sampling_params": GREEDY | params}


def prompt(**fields) -> dict:
    return fields | {"sampling_params": GREEDY}


MALFORMED = {
    "no prompt": prompt(),
    "text is a number": prompt(text=5),
    "text is empty": prompt(text=""),
    "batch with a number": prompt(text=["x", 5]),
    "ids are a string": prompt(input_ids="abc"),
    "ids are floats": prompt(input_ids=[1.5, 2]),
    "ids are nested too deep": prompt(input_ids=[[[1]]]),
    "ids are empty": prompt(input_ids=[]),
    "ids of a batch are empty": prompt(input_ids=[[]]),
    "one of a batch is empty": prompt(input_ids=[[5, 6], []]),
    "id of the vocabulary's size": prompt(input_ids=[5, VOCAB_SIZE]),
    "id is negative": prompt(input_ids=[5, -1]),
    "id of 41 bits": prompt(input_ids=[2**40]),
    "id of 71 bits": prompt(input_ids=[2**70]),
    "prompt beyond the context": prompt(input_ids=[5] * 3000),
    "max_new_tokens is negative": sampling(max_new_tokens=-1),
    "max_new_tokens is a float": sampling(max_new_tokens=1.5),
    "max_new_tokens beyond the context": sampling(max_new_tokens=10**9),
    "temperature is negative": sampling(temperature=-1),
    "top_p is 2": sampling(top_p=2),
    "min_p is 2": sampling(min_p=2),
    "frequency_penalty is 5": sampling(frequency_penalty=5),
    "logit_bias of no token": sampling(logit_bias={"9999999": 1}),
    "stop_token_ids are letters": sampling(stop_token_ids=["a"]),
    "two grammars": sampling(regex="a", ebnf='root ::= "a"'),
    "unknown parameter": sampling(no_such_parameter=1),
    "max_new_tokens is a string": sampling(max_new_tokens="x"),
    "temperature is a string": sampling(temperature="hot"),
    "frequency_penalty is a string": sampling(frequency_penalty="x"),
    "n is a string": sampling(n="x"),
    "a field of SGLang's own": sampling(is_normalized=True),
    "top_k of 41 bits": sampling(top_k=2**40, temperature=1),
    "sampling_seed of 71 bits": sampling(sampling_seed=2**70),
    "max_new_tokens of 71 bits": sampling(max_new_tokens=2**70),
    "stop token outside of the vocabulary": sampling(stop_token_ids=[VOCAB_SIZE], min_new_tokens=2),
    "stop token below 0": sampling(stop_token_ids=[-5], min_new_tokens=2),
    "log probability of no token": GOOD | {"return_logprob": True, "token_ids_logprob": [VOCAB_SIZE]},
    "log probability of a token below 0": GOOD | {"return_logprob": True, "token_ids_logprob": [-1]},
    "log probability of a word": GOOD | {"return_logprob": True, "token_ids_logprob": ["x"]},
    "more log probabilities than tokens": GOOD | {"return_logprob": True, "top_logprobs_num": VOCAB_SIZE + 1},
    "log probabilities below 0": GOOD | {"return_logprob": True, "top_logprobs_num": -1},
    "log probabilities from a word on": GOOD | {"return_logprob": True, "logprob_start_len": "x"},
    "log probabilities from after the prompt": GOOD | {"return_logprob": True, "logprob_start_len": 10**6},
    "regex that does not compile": sampling(regex="(((("),
    "json_schema that is no JSON": sampling(json_schema="{"),
    "ebnf that does not parse": sampling(ebnf="root := ???"),
    "structural_tag of a number": sampling(structural_tag="5"),
    "grammar of a number": sampling(regex=5),
    "n is 0": sampling(n=0),
    "n is huge": sampling(n=10**9),
    "n of many prompts": {"text": [GOOD["text"]] * 300, "sampling_params": GREEDY | {"n": 17}},
    "n of many prompts of ids": {"input_ids": [[5, 6]] * 300, "sampling_params": GREEDY | {"n": 17}},
    "stop is a number": sampling(stop=5),
    "stop_regex is no regex": sampling(stop_regex="("),
    "sampling_params is a list": {"text": "x", "sampling_params": [1]},
    "sampling_params is a string": {"text": "x", "sampling_params": "x"},
    "beam_width is a string": sampling(beam_width="x"),
    "beam_width is 0": sampling(beam_width=0),
    "watermark is a number": GOOD | {"watermark": 5},
    "watermark is no watermark": sampling(watermark={"enabled": "x"}),
    "session that does not exist": GOOD | {"session_params": {"id": "none"}},
    "adapter that does not exist": GOOD | {"lora_path": "none"},
}


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_is_refused(server, name):
    response = post(server, "/generate", json=MALFORMED[name])
    assert response.status_code in (400, 422), response.text
    assert response.json(), "the answer says why"


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize(
    "body",
    ["", "{not json", "[1, 2]", '{"text": "x", "sampling_params": {"temperature": NaN}}', '{"text": "x"', "\x00"],
)
def test_bad_json_is_refused(server, body):
    response = post(server, "/generate", data=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 422), response.text


@pytest.mark.usefixtures("undisturbed")
def test_unknown_field_is_ignored(server, good_text):
    assert text_of(server, GOOD | {"no_such_field": 1}) == good_text


NOT_SUPPORTED = {
    "return_routed_experts": GOOD | {"return_routed_experts": True},
    "return_indexer_topk": GOOD | {"return_indexer_topk": True},
    "return_sampling_mask": GOOD | {"return_sampling_mask": True},
    "return_sampling_mask of drawn tokens": sampling(temperature=1, top_k=5) | {"return_sampling_mask": True},
    "beam_width": sampling(beam_width=4),
    "watermark": GOOD | {"watermark": {"enabled": True}},
    "watermark by its key": sampling(watermark={"key": "0" * 64}),
    # Invalid values that SGLang would unpack, and crash, when the request joins a batch.
    "custom_logit_processor": GOOD | {"custom_logit_processor": "{}"},
    "custom_logit_processor of no class": GOOD | {"custom_logit_processor": '{"callable": "00"}'},
    "custom_logit_processor of text": GOOD | {"custom_logit_processor": "x"},
}


def test_every_refusal_is_tested():
    assert {*REFUSED_OUTPUTS, *REFUSED_PARAMS} <= set(NOT_SUPPORTED)


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("name", NOT_SUPPORTED)
def test_unsupported_is_refused_by_name(server, name):
    response = post(server, "/generate", json=NOT_SUPPORTED[name])
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert message.startswith(name.split()[0])
    assert len(message) < 200


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("name", REFUSED_POSITIONS)
def test_scoring_at_some_tokens_is_refused(server, name):
    """SGLang would return scores of all tokens under speculation."""
    asked = {"input_ids": [5, 6, 7], "return_logprob": True, "token_ids_logprob": [5], name: [1]}
    response = post(server, "/generate", json=asked | {"sampling_params": {"max_new_tokens": 0}})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"].startswith(name)


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize(("path", "name"), [("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")])
def test_openai_api_refuses_by_name(server, path, name):
    response = post(server, path, json={"model": "default", "temperature": 0})
    assert response.status_code == 400
    assert name in response.json()["message"]


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.5},
        {"min_p": 0.5},
        {"sampling_seed": 7},
        {"temperature": 0.7, "top_k": 1},
        {"custom_params": {"a": 1}},
        {"beam_width": 1},
        {"watermark": {"enabled": False}},
    ],
)
def test_what_a_greedy_request_does_not_heed(server, good_text, params):
    assert text_of(server, sampling(**params)) == good_text
    assert text_of(server, sampling(**params) | {"cache_salt": "of its own"}) == good_text


@pytest.mark.usefixtures("undisturbed")
def test_stop_regex_is_honoured(server, good_text):
    """The regex ends the answer inside a block, in which tokens after the match were accepted too."""
    middle = good_text[len(good_text) // 2]
    expected = good_text[: good_text.index(middle)]
    pattern = f"[{middle}]"
    assert text_of(server, sampling(stop_regex=pattern)) in (expected, expected + middle)


@pytest.mark.usefixtures("undisturbed")
def test_refused_beside_good_in_one_batch(server, good_text):
    """Each request of a batch is checked alone, but one error fails the batch. Nothing of the batch remains."""
    response = post(
        server,
        "/generate",
        json={"text": [GOOD["text"]] * 2, "sampling_params": [GREEDY, GREEDY | {"max_new_tokens": 1.5}]},
    )
    assert response.status_code in (200, 400), response.text
    if response.status_code == 200:
        assert response.json()[0]["text"] == good_text


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize(
    ("path", "body"),
    [("/begin_weight_update", {}), ("/update_weights_from_tensor", {"serialized_named_tensors": []})],
)
def test_tensors_for_the_drafter_are_refused(server, path, body):
    response = post(server, path, json=body | {"selector": "draft"})
    assert response.status_code == 400
    assert "selector=draft is not supported with DFLASH" in response.json()["message"]


def cycles_of(server: Server) -> int:
    return post(server, "/generate", json=GOOD).json()["meta_info"]["spec_verify_ct"]


@pytest.mark.usefixtures("undisturbed")
def test_tensors_are_the_targets(server):
    """The tensors are of a layer that the drafter has too, with the same name and shape."""
    tensors = load_file(TARGET_DIR / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    assert tensors[name].shape == load_file(DRAFTER_DIR / "model.safetensors")[name.removeprefix("model.")].shape
    cycles = cycles_of(server)

    payload = base64.b64encode(pickle.dumps([(name, tensors[name])])).decode()
    for path, body in (
        ("/begin_weight_update", {}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": [payload]}),
        ("/end_weight_update", {}),
    ):
        response = post(server, path, json=body)
        assert response.status_code == 200, response.text

    assert cycles_of(server) == cycles


@pytest.mark.usefixtures("undisturbed")
def test_update_of_the_drafter_leaves_the_servers_name(server):
    # A client may have its answer before the scheduler has removed the request.
    assert post(server, "/flush_cache?timeout=60").status_code == 200
    response = post(server, "/update_weights_from_disk", json={"model_path": str(DRAFTER_DIR)})
    assert response.status_code == 200, response.text
    with requests.Session() as http:
        http.trust_env = False
        info = http.get(f"{server._url}/model_info", timeout=120).json()
    assert info["model_path"] == str(TARGET_DIR)
