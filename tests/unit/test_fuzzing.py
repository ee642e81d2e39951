"""Parts of scripts/fuzz.py without servers: drawing, comparing and shrinking."""

import copy
import json
from types import SimpleNamespace

import fuzz
import pytest
from fuzzing import compare
from fuzzing.cases import Case
from fuzzing.compare import EXCEPTIONS, Comparison
from fuzzing.shrink import shrink

PLAIN_CASE = Case(0, "tiny", [], [("max-total-tokens", 640)])
SEEDED_CASE = Case(0, "tiny", [("enable-deterministic-inference", True)], [])


def answer(tokens, **meta_info):
    meta = {"id": "one", "prompt_tokens": 3, "completion_tokens": len(tokens), "num_retractions": 0}
    reason = {"type": "length", "length": len(tokens)}
    return {"text": str(tokens), "output_ids": tokens, "meta_info": meta | {"finish_reason": reason} | meta_info}


def differences(mine, expected, case=PLAIN_CASE, **body):
    params = {"temperature": 0, "max_new_tokens": 50} | body.pop("sampling_params", {})
    request = {"kind": "whole", "path": "/generate", "body": {"input_ids": [1], "sampling_params": params} | body}
    comparison = Comparison(None, case)
    comparison._is_tie = lambda request, position: False
    found = comparison.differences(request, {"status": 200, "answer": mine}, {"status": 200, "answer": expected})
    assert set(comparison.excused) <= set(EXCEPTIONS)
    return [difference.kind for difference in found], list(comparison.excused)


def test_a_seed_is_a_case():
    assert json.dumps(fuzz.draw(5).__dict__) == json.dumps(fuzz.draw(5).__dict__)
    assert fuzz.draw(5) != fuzz.draw(6)


def test_cases_are_of_every_kind():
    cases = [fuzz.draw(seed) for seed in range(60)]
    flags = {name for case in cases for name in case.flags}
    assert {"speculative-adaptive", "page-size", "enable-mixed-chunk", "speculative-draft-window-size"} <= flags
    assert {case.pair for case in cases} == {"tiny", "hybrid"}
    kinds = {request["kind"] for case in cases for row in case.rounds for request in row}
    assert kinds == {"whole", "stream", "hang up", "abort", "hostile"}
    assert not any("enable-mixed-chunk" in case.flags for case in cases if case.pair == "hybrid")


def test_same_answers():
    assert differences(answer([1, 2]), answer([1, 2], id="other", spec_verify_ct=3)) == ([], [])


def test_a_wrong_token():
    assert differences(answer([1, 2, 3]), answer([1, 5, 3]))[0] == ["output_ids"]


def test_a_missing_token():
    assert differences(answer([1, 2]), answer([1, 2, 3]))[0] == ["output_ids"]


@pytest.mark.parametrize("error, found", [(1e-5, []), (1e-2, ["meta_info.output_token_logprobs"])])
def test_a_wrong_log_probability(error, found):
    mine, expected = (answer([7], output_token_logprobs=[[-1.0 + e, 7, None]]) for e in (error, 0))
    assert differences(mine, expected, return_logprob=True)[0] == found


def test_a_wrong_finish_reason():
    kinds, _ = differences(answer([7]), answer([7], finish_reason={"type": "stop", "matched": 7}))
    assert kinds and all(kind.startswith("meta_info.finish_reason") for kind in kinds)


def test_hidden_states_are_those_of_the_same_token():
    """The prompt's states are as many as the cache did not have."""
    mine = answer([1, 2, 3], hidden_states=[[[0.1], [0.5]], [[0.6]], [0.7]])
    expected = answer([1, 2, 3], hidden_states=[[[0.5]], [0.6], [0.7]])
    assert differences(mine, expected, return_hidden_states=True) == ([], ["prompt's own states"])
    mine["meta_info"]["hidden_states"][1] = [[0.9]]
    assert differences(mine, expected, return_hidden_states=True)[0] == ["meta_info.hidden_states"]


def test_what_is_sampled_by_chance_has_a_form():
    params = {"temperature": 1.0, "max_new_tokens": 3}
    assert differences(answer([1, 2]), answer([3, 4, 5]), sampling_params=params) == ([], ["sampled by chance"])
    assert differences(answer([1, 2, 3, 4]), answer([3]), sampling_params=params)[0] == ["output_ids.length"]


def test_seeded_answers_are_compared():
    assert differences(answer([1]), answer([2]), SEEDED_CASE, sampling_params={"temperature": 1.0})[0] == ["output_ids"]


def test_full_pool():
    mine, expected = answer([1] * 10, prompt_tokens=600), answer([1] * 40, prompt_tokens=600)
    assert differences(mine, expected) == ([], ["full pool"])
    mine["meta_info"]["prompt_tokens"] = 100
    assert differences(mine, expected)[0] == ["output_ids"]


def body(**fields):
    return {"kind": "whole", "path": "/generate", "body": {"input_ids": list(range(64)), "sampling_params": fields}}


def test_shrinking():
    """Two of twelve requests remain, with the fields that the failure needs."""
    case = copy.deepcopy(PLAIN_CASE)
    case.rounds = [[body(temperature=0, stop="x", n=i, tag=i) for i in range(4 * k, 4 * k + 4)] for k in range(3)]

    def fails(part):
        tags = [request["body"]["sampling_params"].get("tag") for row in part.rounds for request in row]
        last = part.rounds[-1][-1]["body"]
        return {2, 9} <= set(tags) and "stop" in last["sampling_params"] and len(last["input_ids"]) >= 5

    small = shrink(case, fails, seconds=60)

    assert [len(row) for row in small.rounds] == [1, 1]
    assert small.rounds[1][0]["body"]["sampling_params"] == {"temperature": 0, "stop": "x", "tag": 9}
    assert len(small.rounds[1][0]["body"]["input_ids"]) == 8
    assert len(case.rounds[0]) == 4


def test_shrinking_ends_in_time():
    case = copy.deepcopy(PLAIN_CASE)
    case.rounds = [[body(temperature=0), body(temperature=1)]]
    assert shrink(case, lambda part: True, seconds=0).rounds == case.rounds


def top(*pairs):
    return [[value, token, None] for value, token in pairs]


@pytest.mark.parametrize(
    "mine, expected, found",
    [
        (top((-1, 4), (-2, 5)), top((-1, 4), (-2, 6)), []),
        (top((-1, 4), (-1, 5), (-9, 1)), top((-1, 5), (-1, 4), (-9, 1)), []),
        (top((-1, 4), (None, 0)), top((-1, 4), (None, 1)), []),
        (top((-1, 4), (-2, 5), (-3, 6)), top((-1, 4), (-2, 7), (-3, 6)), ["meta_info.output_top_logprobs"]),
        (top((-1, 4), (-2, 5)), top((-1, 4), (-2.5, 6)), ["meta_info.output_top_logprobs"]),
    ],
    ids=["last", "order", "minus infinity", "not tied", "other value"],
)
def test_tied_log_probabilities(mine, expected, found):
    kinds, excused = differences(answer([4], output_top_logprobs=[mine]), answer([4], output_top_logprobs=[expected]))
    assert kinds == found
    assert excused == ([] if found else ["tied log probabilities"])


def completion(tops):
    return {"text": "{", "logprobs": {"top_logprobs": [dict(tops)]}}


def chat(tops):
    listed = [{"token": text, "logprob": value} for text, value in tops.items()]
    return {"message": {"content": "{"}, "logprobs": {"content": [{"token": "{", "top_logprobs": listed}]}}


@pytest.mark.parametrize("choice", [completion, chat])
@pytest.mark.parametrize(
    "mine, expected, found",
    [
        ({"{": -0.5, "a": -3e38}, {"{": -0.5, "b": -3e38}, False),
        ({"{": -0.5, "a": None}, {"{": -0.5, "b": None, "c": None}, False),
        ({"{": -0.5, "a": -2.0}, {"{": -0.5, "b": -2.5}, True),
        ({"{": -0.5, "a": -3e38}, {"[": -0.5, "b": -3e38}, True),
        ({"{": -0.5, "a": -3e38}, {"{": -0.6, "a": -3e38}, True),
    ],
    ids=["last", "minus infinity", "other value", "not tied", "same texts"],
)
def test_tied_log_probabilities_of_openai(choice, mine, expected, found):
    path = "/v1/completions" if choice is completion else "/v1/chat/completions"
    request = {"kind": "whole", "path": path, "body": {"logprobs": 2}}
    comparison = Comparison(None, PLAIN_CASE)
    outcomes = ({"status": 200, "answer": {"choices": [choice(each)]}} for each in (mine, expected))
    assert bool(comparison.differences(request, *outcomes)) is found
    assert list(comparison.excused) == ([] if found else ["tied log probabilities"])


@pytest.mark.parametrize(
    "ignores_eos, text, found",
    [
        (True, '{"a": 1}', []),
        (True, '{"a": 2}', ["choices.finish_reason"]),
        (False, '{"a": 1}', ["choices.finish_reason"]),
    ],
    ids=["late", "other text", "without ignore_eos"],
)
def test_completions_end_with_their_grammar(ignores_eos, text, found):
    mine = {"choices": [{"text": text, "finish_reason": "stop", "matched_stop": 0}], "usage": {"completion_tokens": 5}}
    longer = {"text": '{"a": 1} more', "finish_reason": "length", "matched_stop": None}
    body = {"response_format": {"type": "json_schema"}, "ignore_eos": ignores_eos}
    request = {"kind": "whole", "path": "/v1/completions", "body": body}
    comparison = Comparison(None, PLAIN_CASE)
    outcomes = ({"status": 200, "answer": {"usage": None} | each} for each in (mine, {"choices": [longer]}))
    kinds = [difference.kind for difference in comparison.differences(request, *outcomes)]
    assert kinds[:1] == found
    assert bool(comparison.excused) is not bool(found)


def test_refused_in_a_stream():
    refused = answer([7], finish_reason={"type": "abort", "message": "too long", "status_code": 400})
    assert differences(refused, refused, sampling_params={"max_new_tokens": 0}) == ([], [])
    assert differences(refused, answer([]), sampling_params={"max_new_tokens": 0}) == (["error"], [])


def test_ruled_out_by_a_processor():
    error = {"type": "abort", "message": "No token is left to choose: all are ruled out", "status_code": 400}
    mine, expected = answer([1], finish_reason=error), answer([1, 2])
    params, processor = {"regex": "ab"}, {"custom_logit_processor": "{}"}
    assert differences(mine, expected, sampling_params=params, **processor) == ([], ["processor against grammar"])
    assert differences(mine, expected, sampling_params=params)[0] == ["error"]
    assert differences(mine, expected, **processor)[0] == ["error"]


@pytest.mark.parametrize(
    ("texts", "stop", "found"),
    [
        (("      a", "      ab c"), "    ", []),
        (("      a", "      ab c"), "  d", ["choices.text"]),
        (("      a", "      bb c"), "    ", ["choices.text"]),
    ],
)
def test_a_stop_that_is_noticed_late(texts, stop, found):
    outcomes = [{"status": 200, "answer": {"choices": [{"text": text, "finish_reason": "stop"}]}} for text in texts]
    request = {"kind": "stream", "path": "/v1/completions", "body": {"stream": True, "stop": stop, "temperature": 0}}
    assert [each.kind for each in Comparison(None, PLAIN_CASE).differences(request, *outcomes)] == found


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
def test_penalties_after_a_retraction(penalty):
    mine, retracted = answer([1, 2]), answer([1, 3], num_retractions=1)
    assert differences(mine, retracted, sampling_params={penalty: 1.5}) == ([], ["penalties after a retraction"])
    assert differences(mine, retracted)[0] == ["output_ids"]
    assert differences(retracted, mine, sampling_params={penalty: 1.5})[0] == ["output_ids"]


def test_a_greedy_answer_that_no_token_was_left_for():
    """SGLang alone takes token 0, which may end the answer."""
    mine = {"status": 400, "answer": {"error": {"message": "No token is left to choose: all are ruled out"}}}
    request = {"kind": "whole", "path": "/generate", "body": RULED_OUT | {"sampling_params": {"regex": "a"}}}
    request["body"]["sampling_params"]["temperature"] = 0
    for tokens, found in (([5, 0], []), ([5, 1], ["status"])):
        of_plain = {"status": 200, "answer": answer(tokens)}
        kinds = [each.kind for each in Comparison(None, PLAIN_CASE).differences(request, mine, of_plain)]
        assert kinds == found


@pytest.mark.parametrize("temperature, is_excused", [(0.7, True), (0, False), (1, False)])
def test_greedy_by_top_k(temperature, is_excused):
    mine, expected = (answer([7], output_token_logprobs=[[value, 7, None]]) for value in (-1.0, -1.5))
    params = {"top_k": 1, "temperature": temperature, "sampling_seed": 1}
    kinds, excused = differences(
        mine, expected, Case(0, "tiny", [["enable-deterministic-inference", True]], []), sampling_params=params
    )
    assert kinds == ([] if is_excused else ["meta_info.output_token_logprobs"])
    assert ("greedy by top_k" in excused) is is_excused


@pytest.mark.parametrize("is_running, found", [(False, []), (True, ["status"])])
def test_end_of_the_plain_server(is_running, found, monkeypatch):
    monkeypatch.setattr(compare, "_DIAGNOSTICS_SECONDS", 0.1)
    plain = SimpleNamespace(is_running=lambda: is_running)
    comparison = Comparison(SimpleNamespace(plain=plain), PLAIN_CASE)
    request = {"kind": "whole", "path": "/generate", "body": {"input_ids": [1], "sampling_params": {}}}
    outcomes = {"status": 200, "answer": answer([1])}, {"status": "no answer: ConnectionError", "answer": None}
    assert [each.kind for each in comparison.differences(request, *outcomes)] == found
    assert list(comparison.excused) == ([] if found else ["plain server ended"])
    # That of the other server is never excused.
    assert [each.kind for each in comparison.differences(request, *reversed(outcomes))] == ["status"]


RULED_OUT = {"regex": "ab", "custom_logit_processor": "{}"}


@pytest.mark.parametrize(
    ("body", "plain", "case", "found"),
    [
        (RULED_OUT, 500, PLAIN_CASE, []),
        ({"regex": "ab"}, 500, PLAIN_CASE, ["status"]),
        # Sampled by chance, the other answer came to no such token.
        (RULED_OUT, 200, PLAIN_CASE, []),
        (RULED_OUT, 503, PLAIN_CASE, ["status"]),
        (RULED_OUT, 200, SEEDED_CASE, ["status"]),
        (RULED_OUT | {"temperature": 0}, 200, PLAIN_CASE, ["status"]),
    ],
)
def test_a_body_is_ruled_out_by_a_processor(body, plain, case, found):
    mine = {"status": 400, "answer": {"error": {"message": "No token is left to choose: all are ruled out"}}}
    request = {"kind": "whole", "path": "/v1/completions", "body": body}
    of_plain = {"status": plain, "answer": {}}
    differences = Comparison(None, case).differences(request, mine, of_plain)
    assert [difference.kind for difference in differences] == found
