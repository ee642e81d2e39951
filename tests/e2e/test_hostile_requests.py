"""Requests that mean harm: each gets its answer or a 4xx, and whoever asks beside them notices nothing."""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
import random
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from serving import SYNC, Settings, assert_same_answers, generate_body, with_plugin
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

from sglang_dflash.requests.validate import BY_SAMPLER, BY_SGLANG, INTERNAL, REFUSED_PARAMS

VOCAB_SIZE = 1024
FLAGS = (
    ("enable-custom-logit-processor", True),
    ("enable-return-hidden-states", True),
    ("enable-priority-scheduling", True),
    ("tool-call-parser", "qwen25"),
)
# Every observability flag that needs no GPU and no other service: logs and counts of a request can fail over it.
FOLDER = Path(tempfile.gettempdir()) / "sglang-dflash-hostile-requests"
OBSERVED = (
    ("enable-metrics", True),
    ("enable-mfu-metrics", True),
    ("enable-metrics-for-all-schedulers", True),
    ("extra-metric-labels", '{"site": "test"}'),
    ("tokenizer-metrics-allowed-custom-labels", ("team",)),
    ("export-metrics-to-file", True),
    ("export-metrics-to-file-dir", FOLDER),
    ("enable-request-time-stats-logging", True),
    ("decode-log-interval", 1),
    ("gc-warning-threshold-secs", 1),
    ("show-time-cost", True),
    ("crash-dump-folder", FOLDER),
    ("log-requests", True),
    ("log-requests-target", ("stdout", FOLDER)),
)
TEXT_LOG = (("log-requests-level", 2), ("log-requests-format", "text"))
JSON_LOG = (("log-requests-level", 3), ("log-requests-format", "json"))
# Prompts and decoding requests in one batch, too.
MIXED = (("enable-mixed-chunk", True), ("chunked-prefill-size", 64))
OVERLAP = Settings("hostile-overlap", flags=(*FLAGS, *MIXED, *OBSERVED, *TEXT_LOG), env=with_plugin("late_edits"))
SYNCHRONOUS = Settings("hostile-sync", flags=(*FLAGS, SYNC, *OBSERVED, *JSON_LOG))
in_both = pytest.mark.parametrize("settings", [OVERLAP, SYNCHRONOUS], indirect=True, ids=str)
in_overlap = pytest.mark.parametrize("settings", [OVERLAP], indirect=True, ids=str)

TEXT = "def f(x):\n"
LETTER_A = "66"
REQUEST_SECONDS = 120


def body(fields: dict | None = None, **params) -> dict:
    # Processors find their request in an object of parameters.
    params = {"temperature": 0, "max_new_tokens": 24, "custom_params": {"any": 1}} | params
    return {"text": TEXT, "sampling_params": params} | (fields or {})


def processor(code: str) -> dict:
    """Fields of a request: what SGLang unpacks, and calls without arguments to get a logit processor."""
    unpacked = functools.partial(eval, code)
    return {"custom_logit_processor": json.dumps({"callable": pickle.dumps(unpacked).hex()})}


def late(code: str) -> str:
    """A processor that works for eight tokens: it fails in decode cycles only."""
    return f"lambda logits, params: {code} if len(params[0]['__req__'].output_ids) > 8 else logits"


NOTHING_LEFT = {
    "schema of nothing": body(json_schema='{"$ref": "#"}'),
    "grammar of nothing": body(ebnf="root ::= root"),
    "min_new_tokens beyond the grammar": body(regex="ab", min_new_tokens=20),
    "min_new_tokens beyond a long grammar": body(regex="(ab){13}", min_new_tokens=40, max_new_tokens=40),
    "every token biased away": body(logit_bias={str(token): -1e39 for token in range(VOCAB_SIZE)}),
    "processor of NaN": body(processor("lambda logits, params: logits * float('nan')")),
    "processor of NaN, late": body(processor(late("logits * float('nan')"))),
    "processor of -inf, late": body(processor(late("logits - float('inf')"))),
}
PROCESSOR_FAILS = {
    "processor raises": body(processor("lambda logits, params: 1 / 0")),
    "processor raises late": body(processor(late("1 / 0"))),
    "processor of another shape": body(processor("lambda logits, params: logits[:, :5]")),
    "processor of another shape, late": body(processor(late("logits[:, :5]"))),
    "processor of no tensor": body(processor("lambda logits, params: 5")),
    "processor takes nothing": body(processor("lambda: None")),
}
# By the beginning of the message.
REFUSED = {
    "custom_logit_processor cannot be unpacked": [
        body(processor("1 / 0")),
        body(processor("__import__('no_such_module')")),
        body({"custom_logit_processor": "{}"}),
        body({"custom_logit_processor": '{"callable": "80"}'}),
    ],
    "custom_logit_processor is a int": [body(processor("5"))],
    "stop_token_ids": [
        body(stop_token_ids=[5000], max_new_tokens=50),
        body(stop_token_ids=[-1]),
        body(stop_token_ids=[VOCAB_SIZE]),
    ],
    "logit_bias": [body(logit_bias={"5": 1e39}), body(logit_bias={"5": 2e30}), body(logit_bias={str(VOCAB_SIZE): 1})],
    "temperature=": [body(temperature=1e300), body(temperature=1e39)],
    "top_p=": [body(temperature=1, top_p=1e-50)],
    "repetition_penalty=": [body(repetition_penalty=1e-300)],
    "input_embeds": [
        {"input_embeds": []},
        {"input_embeds": [[]]},
        {"input_embeds": [[0.5, 0.5]]},
        {"input_embeds": [[[0.5]], [[0.5]]]},
    ],
    "text is an empty list": [body({"text": []})],
    "rid is a list": [body({"rid": ["a"]}), body({"rid": []})],
    "rid has 2 values": [body({"rid": ["a", "b"], "text": [TEXT] * 3})],
    "sampling_params is a list": [body({"sampling_params": []}), body({"sampling_params": [{}, {}]})],
    "sampling_params has 1 values": [body({"sampling_params": [{}], "text": [TEXT] * 2})],
    "sampling_params has 0 values": [body({"sampling_params": [], "text": [TEXT] * 2})],
    "token_ids_logprob has": [
        body({"token_ids_logprob": [[1], [2]], "text": [TEXT] * 3, "return_logprob": True}),
    ],
    "positional_embed_overrides=": [body({"positional_embed_overrides": 1.5})],
    "Unknown session parameter 'nonsense'": [body({"session_params": {"nonsense": 1}})],
    "offset='x'": [body({"session_params": {"id": "none", "offset": "x"}})],
    "input_ids is a list of 1 prompts": [body({"input_ids": [[5]]})],
    "input_ids has -1,": [{"input_ids": [-1]}, {"input_ids": [[5], [6, -1]]}],
    f"input_ids has {VOCAB_SIZE},": [{"input_ids": [VOCAB_SIZE]}],
    "Unknown label 'group' in custom_labels": [
        body({"custom_labels": {"group": "a"}}),
        body({"custom_labels": {"team": "a", "group": "a"}}),
        body({"custom_labels": {"group": "a"}, "text": [TEXT] * 2}),
    ],
    "Unknown label 'model_name' in custom_labels": [body({"custom_labels": {"model_name": "a"}})],
    "n=None": [body(n=None)],
    "stop_regex=": [
        body(stop_regex=pattern)
        for pattern in (
            "a{1,99999999999}",
            "(" * 5000 + "a" + ")" * 5000,
            "(" * 120 + "a" + ")" * 121,
            "(a{1,900}){1,900}",
            "(){999999999}a{1,5000}",
            "(a+)\\1b",
            ["a", "["],
        )
    ],
}
# Fields of tokenised requests, as front ends without checks hand them to the scheduler.
UNCHECKED = {
    "temperature": [{"sampling_params": {"temperature": value}} for value in (-1.0, 1e-300, 1e300, float("nan"))],
    "top_p": [{"sampling_params": {"top_p": value}} for value in (0.0, 1e-50, float("nan"))],
    "top_k": [{"sampling_params": {"top_k": value}} for value in (0, 2**40)],
    "min_p": [{"sampling_params": {"min_p": 2.0}}],
    "repetition_penalty": [{"sampling_params": {"repetition_penalty": 1e-300}}],
    "frequency_penalty": [{"sampling_params": {"frequency_penalty": float("nan")}}],
    "max_new_tokens": [{"sampling_params": {"max_new_tokens": 2**63, "min_new_tokens": 0}}],
    "min_new_tokens": [{"sampling_params": {"min_new_tokens": -5}}],
    "logit_bias": [{"sampling_params": {"logit_bias": {token: 1e39}}} for token in ("5", "99999")],
    "stop_token_ids": [{"sampling_params": {"stop_token_ids": [VOCAB_SIZE]}}],
    "stop_regex": [{"sampling_params": {"stop_regex_strs": ["a{1,99999999999}"]}}],
    "invalid literal": [{"sampling_params": {"logit_bias": {"x": 1.0}}}],
    "beam_width": [{"sampling_params": {"beam_width": 4}}],
    "sampling_seed": [{"sampling_params": {"sampling_seed": 2**63}}],
    "top_logprobs_num": [{"return_logprob": True, "top_logprobs_num": value} for value in (-1, 10**6)],
    "token_ids_logprob": [{"return_logprob": True, "token_ids_logprob": [VOCAB_SIZE]}],
    "logprob_start_len": [{"return_logprob": True, "logprob_start_len": -7}],
    "input_embeds": [{"input_embeds": embeds} for embeds in ([], [[0.5]], [[0.5] * 256, []])],
    "input_ids": [{"input_ids": ids} for ids in (None, [-1], [VOCAB_SIZE])],
    "custom_logit_processor": [{"custom_logit_processor": "{}"}],
    "return_routed_experts": [{"return_routed_experts": True}],
    "token_indices_to_pool": [{"token_indices_to_pool": [5]}],
    "multi_item_delimiter_indices": [{"multi_item_delimiter_indices": [0]}],
}
# What sounds as bad and is answered.
SERVED = {
    "catastrophic stop_regex": body(stop_regex="(a+)+b", logit_bias={LETTER_A: 100}, max_new_tokens=400),
    "stop_regex in many ways": body(stop_regex=["(a|a)*b", "(.*)*x", "(a?){60}a{60}b"], max_new_tokens=200),
    "processor of nothing": body(processor("lambda logits, params: logits")),
    "processor of inf": body(processor("lambda logits, params: logits.double() * 1e300")),
    "grammars that no answer ends": body(regex="(zq){300}", max_new_tokens=30),
    "numbers that no answer ends": body(json_schema='{"type": "integer", "minimum": 5}', max_new_tokens=30),
    "custom label": body({"custom_labels": {"team": 'a"\n\0 \U0001f4a9'}}),
    "nothing but the end": body(regex="(a)?", logit_bias={"0": 100}, ignore_eos=True),
}

# --- Every parameter and field, with values of every kind -----------------------------------------------------------

VALUES = [
    None,
    True,
    "",
    "x",
    "\0 \U0001f4a9 ‮",
    "\ud800",
    "9" * 5000,
    -1,
    0,
    1.5,
    2**70,
    -(2**70),
    float("nan"),
    float("inf"),
    -1e308,
    [],
    [[1]],
    [None],
    {},
    {"a": {"b": [1]}},
]
PARAMETERS = [*BY_SGLANG, *BY_SAMPLER, *REFUSED_PARAMS, *INTERNAL, "no_such_parameter"]
FIELDS = [*(field.name for field in dataclasses.fields(GenerateReqInput)), "no_such_field"]
BROKEN_GRAMMARS = {
    "json_schema": [
        "{",
        "5",
        "[]",
        "null",
        '{"type": "nonsense"}',
        '{"$ref": "#/no/where"}',
        '{"minimum": "x"}',
        "[" * 500,
    ],
    "regex": ["(", "[", "a{9,1}", "\\p{Nonsense}", "(?<=a)b", "\\1", "[^\\x00-\\U0010FFFF]", "(" * 500, "a{1,99999}"],
    "ebnf": ["", "root := x", 'root ::= "a', "root ::= missing", 'other ::= "a"', "root ::= root root", "\0"],
    "structural_tag": ["{", "5", "{}", '{"type": "structural_tag"}', '{"structures": 5, "triggers": 6}', "[]"],
}
RAW = [
    b"",
    b"{",
    b'{"text": "x"',
    b"[1, 2]",
    b"5",
    b"null",
    b"\x00\xff\xfe",
    b'{"text": "\xff"}',
    b'{"text": "x", "sampling_params": {"temperature": 1e400}}',
    b'{"text": "x", "text": 5}',
    b"[" * 3000,
    b'{"a":' * 3000,
]
OPENAI = [
    ("/v1/completions", {}),
    ("/v1/completions", {"prompt": None}),
    ("/v1/completions", {"prompt": []}),
    ("/v1/completions", {"prompt": [[]]}),
    ("/v1/completions", {"prompt": {"a": 1}}),
    ("/v1/completions", {"prompt": [VOCAB_SIZE]}),
    ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 10**9}),
    ("/v1/completions", {"prompt": "x", "n": 10**9}),
    ("/v1/completions", {"prompt": "x", "n": 0}),
    ("/v1/completions", {"prompt": "x", "logprobs": -1}),
    ("/v1/completions", {"prompt": "x", "logprobs": 10**9}),
    ("/v1/completions", {"prompt": "x", "temperature": -1}),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"5": 1e39}}),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"x": 1}}),
    ("/v1/completions", {"prompt": "x", "stop": 5}),
    ("/v1/completions", {"prompt": "x", "stop_token_ids": [5000]}),
    ("/v1/completions", {"prompt": "x", "stop_regex": "a{1,99999999999}"}),
    ("/v1/completions", {"prompt": "x", "regex": "("}),
    ("/v1/completions", {"prompt": "x", "ebnf": "root ::= root", "max_tokens": 5}),
    ("/v1/completions", {"prompt": "x", "json_schema": '{"$ref": "#"}', "max_tokens": 5}),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}),
    ("/v1/completions", {"prompt": "x", "stream": True, "temperature": -1}),
    ("/v1/chat/completions", {}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": None}),
    ("/v1/chat/completions", {"messages": "x"}),
    ("/v1/chat/completions", {"messages": [{}]}),
    ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": "x"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": 5}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tool_choice": "nonsense"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "x"}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 10**6, "logprobs": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "min_tokens": 50, "max_tokens": 5}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": "many"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 20000}], "max_tokens": 5}),
]
PROMPTS = [
    {"text": ""},
    {"text": "x" * 10**6},
    {"text": TEXT, "input_ids": [5]},
    {"input_ids": []},
    {"input_ids": [[]]},
    {"input_ids": [[5], []]},
    {"input_ids": [5] * 2047},
    {"input_ids": [5] * 5000},
    {"input_ids": [-1]},
    {"input_ids": [VOCAB_SIZE]},
    {"input_ids": [2**63]},
    {"input_ids": [5, [6]]},
    {"input_ids": [[5], 6]},
    {"text": [TEXT, None]},
    {"text": [TEXT, ""]},
    {"text": [[TEXT]]},
    {"input_embeds": [[0.5] * 256]},
    {"text": [TEXT] * 2, "rid": ["twice", "twice"]},
    {"text": [TEXT] * 5000, "sampling_params": {"max_new_tokens": 1, "n": 50}},
    {"text": TEXT, "session_params": {"id": "none"}} | processor("1 / 0"),
    {"text": TEXT, "session_params": {"id": "none"}, "sampling_params": {"regex": "a", "min_new_tokens": 3}},
]


def systematic() -> list[dict]:
    """More than a thousand bodies."""
    bodies = [body({name: value}, max_new_tokens=4) for name in FIELDS for value in VALUES]
    bodies += [body(**{"max_new_tokens": 4, name: value}) for name in PARAMETERS for value in VALUES]
    bodies += [body(**{"max_new_tokens": 4, name: code}) for name, codes in BROKEN_GRAMMARS.items() for code in codes]
    bodies += [
        body({"return_logprob": True, name: value}, max_new_tokens=4)
        for name in ("top_logprobs_num", "token_ids_logprob", "logprob_start_len")
        for value in VALUES
    ]
    return bodies


@pytest.fixture(scope="session")
def good(prompts):
    return [
        {"input_ids": prompts[i], "max_new_tokens": 40, "ignore_eos": True}
        | ({"presence_penalty": 0.5} if i % 4 == 0 else {})
        for i in range(8)
    ]


@pytest.fixture(scope="session")
def quiet(keeper, settings, good):
    """The answers to the good requests while nobody else asks."""
    return keeper.server(settings, dflash=True).generate_concurrently(good)


@pytest.fixture
def server(keeper, settings, good, quiet):
    """Asked for the good answers all the time, which stay what they are; afterwards it is well and holds nothing."""
    server = keeper.server(settings, dflash=True)
    is_over = threading.Event()

    def ask():
        rounds = 0
        while not is_over.is_set() or not rounds:
            assert_same_answers(server.generate_concurrently(good), quiet)
            rounds += 1

    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask)
        yield server
        is_over.set()
        asking.result()
    assert server.is_running()
    server.get("/health")
    assert server.internal_state()["sglang_dflash"]["worker"] == "DFlashWorker"
    server.flush_cache()
    server.wait_until_empty()
    assert_same_answers(server.generate_concurrently(good), quiet)


def post(server, content: dict | bytes, path: str = "/generate", content_type: str = "application/json"):
    """A connection of its own; Python's JSON writes NaN and half characters."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    with requests.Session() as http:
        http.trust_env = False
        headers = {"Content-Type": content_type}
        return http.post(f"{server._url}{path}", data=data, headers=headers, timeout=REQUEST_SECONDS)


def status(server, content: dict | bytes, path: str = "/generate", content_type: str = "application/json") -> int | str:
    try:
        return post(server, content, path, content_type).status_code
    except requests.RequestException as error:
        return f"no answer: {type(error).__name__}"


def message(response) -> str:
    return response.json()["error"]["message"]


def drawn(request: dict) -> dict:
    # Of random tokens, any may be the end.
    return request | {"sampling_params": request["sampling_params"] | {"temperature": 1.0, "ignore_eos": True}}


def shown(content) -> str:
    text = repr(content)
    return text if len(text) < 300 else f"{text[:250]}... ({len(text)} characters)"


def assert_answered(server, asked: list[tuple]) -> None:
    """Each of the arguments of `post` gets an answer, and never a 5xx."""
    with ThreadPoolExecutor(16) as threads:
        statuses = list(threads.map(lambda arguments: status(server, *arguments), asked))
    bad = [
        f"{answered} for {shown(arguments)}"
        for arguments, answered in zip(asked, statuses)
        if answered not in (200, 400, 404, 405, 413, 415, 422)
    ]
    assert not bad, "\n".join([f"{len(bad)} of {len(asked)}:", *bad[:20]])


@in_both
def test_requests_that_fail_alone(server):
    """In prefill and in decode cycles, greedy and drawn, many at a time."""
    left = [each for request in NOTHING_LEFT.values() for each in (request, drawn(request))]
    fails = [each for request in PROCESSOR_FAILS.values() for each in (request, drawn(request))]
    with ThreadPoolExecutor(16) as threads:
        responses = list(threads.map(lambda request: post(server, request), [*left, *fails]))

    for request, response in zip(left, responses):
        assert response.status_code == 400, f"{shown(request)}: {response.text}"
        assert message(response).startswith("No token is left to choose: all are ruled out by ")
    for request, response in zip(fails, responses[len(left) :]):
        assert response.status_code == 400, f"{shown(request)}: {response.text}"
        assert message(response).startswith("custom_logit_processor failed: ")


@in_overlap
def test_requests_that_no_front_end_has_checked(server):
    cases = [(named, fields) for named, each in UNCHECKED.items() for fields in each]
    bodies = [body({"routing_key": f"late: {json.dumps(fields)}"}) for _, fields in cases]
    with ThreadPoolExecutor(16) as threads:
        responses = list(threads.map(lambda request: post(server, request), bodies))

    for (named, fields), response in zip(cases, responses):
        assert response.status_code == 400, f"{fields}: {response.text}"
        assert named in message(response), fields


@in_both
def test_requests_that_fail_while_they_stream(server):
    for request in (NOTHING_LEFT["processor of NaN, late"], PROCESSOR_FAILS["processor raises late"]):
        *_, last = server.post_stream("/generate", request | {"stream": True})
        reason = last["error"]["message"] if "error" in last else last["meta_info"]["finish_reason"]["message"]
        assert reason.startswith(("No token is left", "custom_logit_processor failed"))


def limited(limit: int, **params) -> dict:
    """A request whose processor fails after `limit` tokens."""
    code = "lambda logits, params: logits if len(params[0]['__req__'].output_ids) < params[0]['limit'] else 1 / 0"
    return body(processor(code), custom_params={"limit": limit}, ignore_eos=True, **params)


@in_both
def test_requests_that_end_before_they_fail(server):
    """In the cycle in which they fail, or in an earlier one."""
    tokens = post(server, body(max_new_tokens=24, ignore_eos=True)).json()["output_ids"]
    for length in range(2, 24):
        response = post(server, limited(length, max_new_tokens=length))
        assert response.status_code == 200, f"{length}: {response.text}"
        assert response.json()["output_ids"] == tokens[:length]


@in_both
def test_what_a_request_has_when_it_fails(server):
    tokens = post(server, body(max_new_tokens=24, ignore_eos=True)).json()["output_ids"]
    for length in range(2, 20, 3):
        chunks = list(server.post_stream("/generate", limited(length, max_new_tokens=24) | {"stream": True}))
        assert [chunk["output_ids"] for chunk in chunks if chunk.get("output_ids")][-1] == tokens[:length]


@in_overlap
def test_requests_that_are_refused(server):
    for name, bodies in REFUSED.items():
        for request in bodies:
            response = post(server, request)
            assert response.status_code == 400, f"{shown(request)}: {response.text}"
            assert name in message(response)
            assert len(message(response)) < 400


@in_overlap
def test_requests_that_are_answered(server):
    for name, request in SERVED.items():
        response = post(server, request)
        assert response.status_code == 200, f"{name}: {response.text}"


@in_overlap
def test_processor_that_wants_equal_parameters(server):
    """SGLang hands it the rows of all that brought it, of which this one wants the same from each."""
    some = [
        {
            "input_ids": [5, 6, 7],
            "max_new_tokens": 40,
            "custom_logit_processor": DisallowedTokensLogitsProcessor.to_str(),
            "custom_params": {"token_ids": [token]},
        }
        for token in (200, 263, 296, 359)
    ]
    alone = [server.generate(**each) for each in some]

    assert_same_answers(server.generate_concurrently(some), alone)


@in_overlap
def test_what_ended_the_server_when_two_met(server):
    """At the merge of their penalties."""
    long = generate_body([5, 6], {"min_new_tokens": 1500, "max_new_tokens": 1500})
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(post, server, long)
        statuses = [status(server, body(stop_token_ids=[5000], max_new_tokens=50)) for _ in range(5)]
        assert statuses == [400] * 5
        assert running.result().status_code == 200


@in_overlap
def test_stop_regex_ends_where_re_finds_it(server):
    """With many ways to match, as with few."""
    answer = server.generate([5, 6, 7], max_new_tokens=100, ignore_eos=True)
    whole, text = answer["text"], answer["text"][: len(answer["text"]) // 2]
    last = text.split()[-1]
    light, heavy = (
        server.generate([5, 6, 7], max_new_tokens=100, ignore_eos=True, stop_regex=pattern)
        for pattern in (f"{last[-1]}", f"([^a]|a|.)*{last[-1]}")
    )
    assert heavy["output_ids"] == light["output_ids"] != answer["output_ids"]
    assert whole.startswith(heavy["text"])
    assert heavy["meta_info"]["finish_reason"]["type"] == "stop"


@in_overlap
def test_every_parameter_and_field(server):
    bodies = systematic()
    assert len(bodies) > 1000
    random.Random(0).shuffle(bodies)
    assert_answered(server, [(each,) for each in bodies])


@in_overlap
def test_prompts_bodies_and_paths(server):
    asked = [({"sampling_params": {"max_new_tokens": 4}} | prompt,) for prompt in PROMPTS]
    asked += [(raw,) for raw in RAW]
    asked += [(raw, "/v1/completions") for raw in RAW]
    # SGLang's chat answers a body that is JSON and no object with a 500.
    asked += [(raw, "/v1/chat/completions") for raw in RAW if raw not in (b"[1, 2]", b"5", b"null")]
    asked += [(body(), "/generate", kind) for kind in ("", "text/plain", "multipart/form-data", "application/xml")]
    asked += [({"model": "tiny", "max_tokens": 4} | content, path) for path, content in OPENAI]
    assert_answered(server, asked)


@in_overlap
def test_clients_that_hang_up(server):
    chance = random.Random(0)

    def hang_up(i: int) -> None:
        options = {"max_new_tokens": 400, "ignore_eos": True, "temperature": i % 2}
        options |= chance.choice([{}, {"regex": "[a-z ]{300}"}, {"presence_penalty": 1}, {"logit_bias": {"5": 1}}])
        stream = server.stream([5, 6, i], **options)
        for _ in range(chance.randrange(4)):
            next(stream)
        stream.close()

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(hang_up, range(60)))


@in_overlap
def test_same_request_id_at_the_same_time(server):
    with ThreadPoolExecutor(8) as threads:
        statuses = list(threads.map(lambda _: status(server, body({"rid": "mine"}, max_new_tokens=60)), range(8)))
    assert set(statuses) <= {200, 400}
    assert 200 in statuses
