"""SGLang's other ways to ask, to stream and to manage a server work as without speculation."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import REQUESTS, assert_same_answers

pytestmark = pytest.mark.parametrize("settings", [REQUESTS], indirect=True, ids=str)


def test_echo(pair):
    body = {"model": "tiny", "prompt": "def f(x):\n", "temperature": 0, "max_tokens": 30, "echo": True}

    dflash, plain = pair.ask(lambda server: server.post("/v1/completions", body)["choices"][0])

    assert dflash["text"].startswith("def f(x):\n")
    assert dflash["text"] == plain["text"]


@pytest.mark.parametrize(
    "params",
    [
        {"skip_special_tokens": False, "ignore_eos": True},
        {"skip_special_tokens": False, "no_stop_trim": True, "stop": ["\n"]},
        {"spaces_between_special_tokens": False, "ignore_eos": True},
    ],
)
def test_detokenization(pair, prompts, params):
    pair.lossless(lambda server: server.generate(prompts[5], max_new_tokens=60, **params))


def test_stream_interval(pair, prompts):
    whole = pair.plain.generate(prompts[9], max_new_tokens=80, ignore_eos=True)

    def stream(interval):
        options = {"max_new_tokens": 80, "ignore_eos": True, "stream_interval": interval}
        return list(pair.dflash.stream(prompts[9], **options))

    often, seldom = stream(1), stream(40)

    assert len(seldom) < len(often)
    assert_same_answers(often[-1], whole)
    assert_same_answers(seldom[-1], whole)


def test_priorities(pair, prompts):
    requests = [
        {"input_ids": prompt, "max_new_tokens": 60, "ignore_eos": True, "priority": i % 3}
        for i, prompt in enumerate(prompts[:24])
    ]

    pair.lossless(lambda server: server.generate_concurrently(requests))


def test_session(pair, prompts):
    """The second turn continues where the first ended."""

    def two_turns(server):
        session = server.post("/open_session", {"capacity_of_str_len": 4000})
        first = server.generate(prompts[6], max_new_tokens=30, session_params={"id": session})
        rid = first["meta_info"]["id"]
        more = {"id": session, "rid": rid}
        second = server.generate(prompts[7][:20], max_new_tokens=30, session_params=more)
        server.post("/close_session", {"session_id": session})
        return [first, second]

    answers = pair.lossless(two_turns)

    alone = pair.plain.generate(prompts[7][:20], max_new_tokens=30)
    assert answers[1]["meta_info"]["prompt_tokens"] > alone["meta_info"]["prompt_tokens"]


def test_session_after_a_stop(pair, prompts):
    """The second turn gets the answer to its end, and no token that a cycle accepted after it."""
    answer = pair.plain.generate(prompts[6], max_new_tokens=30)["output_ids"]
    stops = sorted(set(answer), key=answer.index)[3:11]

    def two_turns(server):
        answers = []
        for stop in stops:
            session = server.post("/open_session", {"capacity_of_str_len": 4000})
            asked = {"max_new_tokens": 30, "stop_token_ids": [stop]}
            answers.append(server.generate(prompts[6], session_params={"id": session}, **asked))
            more = {"id": session, "rid": answers[-1]["meta_info"]["id"]}
            answers.append(server.generate(prompts[7][:20], max_new_tokens=30, session_params=more))
            server.post("/close_session", {"session_id": session})
        return answers

    dflash, plain = pair.ask(two_turns)

    assert_same_answers(dflash, plain)
    lens = [[answer["meta_info"]["prompt_tokens"] for answer in answers] for answers in (dflash, plain)]
    assert lens[0] == lens[1] and len(set(lens[0])) > 2


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause(pair, prompts, mode):
    # Long enough that the load is reported while they run.
    requests = [{"input_ids": prompt, "max_new_tokens": 600, "ignore_eos": True} for prompt in prompts[:4]]

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(pair.dflash.generate_concurrently, requests)
        while pair.dflash.loads()[0]["num_running_reqs"] == 0 and not running.done():
            time.sleep(0.02)
        pair.dflash.post("/pause_generation", {"mode": mode})
        assert not running.done()
        pair.dflash.post("/continue_generation", {})
        answers = running.result()

    assert_same_answers(answers, pair.plain.generate_concurrently(requests))
