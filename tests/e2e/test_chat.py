"""Tool calls and reasoning through `/v1/chat/completions`."""

import json

import pytest
from serving import REQUESTS

pytestmark = pytest.mark.parametrize("settings", [REQUESTS], indirect=True, ids=str)

QUESTION = {"model": "tiny", "messages": [{"role": "user", "content": "class Stack:\n"}], "temperature": 0}
TOOL = {
    "type": "function",
    "function": {
        "name": "push",
        "parameters": {
            "type": "object",
            "properties": {"value": {"enum": [1, 2, 3]}, "name": {"type": "string", "maxLength": 8}},
            "required": ["value", "name"],
        },
    },
}


def ask(pair, **body):
    dflash, plain = pair.ask(lambda server: server.post("/v1/chat/completions", QUESTION | body))
    for name in ("prompt_tokens", "completion_tokens", "reasoning_tokens"):
        assert dflash["usage"][name] == plain["usage"][name], name
    [dflash], [plain] = dflash["choices"], plain["choices"]
    assert dflash["finish_reason"] == plain["finish_reason"]
    return dflash["message"], plain["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "push"}}])
def test_tool_calls(pair, choice):
    without_reasoning = {"chat_template_kwargs": {"enable_thinking": False}}
    dflash, plain = ask(pair, tools=[TOOL], tool_choice=choice, max_tokens=200, **without_reasoning)

    calls = [call["function"] for call in dflash["tool_calls"]]
    assert calls == [call["function"] for call in plain["tool_calls"]]
    assert calls[0]["name"] == "push"
    json.loads(calls[0]["arguments"])


def test_reasoning(pair):
    """The grammar starts after the end of the reasoning."""
    schema = {"name": "push", "schema": TOOL["function"]["parameters"]}

    dflash, plain = ask(pair, response_format={"type": "json_schema", "json_schema": schema}, max_tokens=120)

    assert dflash == plain
    assert dflash["reasoning_content"] or dflash["content"]


def test_reasoning_is_counted_up_to_the_end(pair, prompts):
    """A cycle may accept tokens after the end of the reasoning."""
    lengths = [1, 5, 17, 31, 60]
    requests = [
        {"input_ids": prompt, "max_new_tokens": length, "require_reasoning": True}
        for prompt, length in zip(prompts, lengths)
    ]
    requests += [
        {"input_ids": prompt, "max_new_tokens": 60, "require_reasoning": True, "stop": ["e", "s"]}
        for prompt in prompts[:4]
    ]

    answers = pair.lossless(lambda server: server.generate_concurrently(requests))

    for answer in answers:
        assert answer["meta_info"]["reasoning_tokens"] == answer["meta_info"]["completion_tokens"]
