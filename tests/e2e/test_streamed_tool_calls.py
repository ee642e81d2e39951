"""Streamed tool calls through `/v1/chat/completions`, with chunks of many tokens, as cycles have."""

import json
import re
from collections.abc import Iterable

import pytest
from serving import REQUESTS, Settings

# A cycle of the tiny pair commits few tokens of a forced text. So chunks have several cycles.
STREAMED = Settings(
    "requests-stream-interval", flags=REQUESTS.flags, dflash_flags=(("stream-interval", 12),), plain=REQUESTS
)
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("push", "pop")]
CALLS = [{"name": "push", "arguments": '{"value": 1, "name": "one"}'}, {"name": "pop", "arguments": "{}"}]


def joined(chunks: Iterable[dict]) -> tuple[str, list[dict]]:
    """Return the text and the calls of a stream."""
    text, calls = "", {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls") or []:
                call = calls.setdefault(part["index"], {"name": "", "arguments": ""})
                for name in call:
                    call[name] += part["function"].get(name) or ""
    return text, [calls[i] for i in sorted(calls)]


def parsed(calls: list[dict]) -> list[dict]:
    return [call | {"arguments": json.loads(call["arguments"])} for call in calls]


@pytest.mark.parametrize("settings", [STREAMED], indirect=True, ids=str)
def test_nothing_of_a_stream_is_lost(pair):
    written = "\n".join(
        f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}\n</tool_call>' for call in CALLS
    )
    body = {"model": "tiny", "messages": [{"role": "user", "content": "class Stack:\n"}], "temperature": 0}
    body |= {"tools": TOOLS, "tool_choice": "auto", "chat_template_kwargs": {"enable_thinking": False}}
    body |= {"regex": re.escape(f"I push.\n{written}"), "max_tokens": 200, "stream": True}

    dflash, plain = pair.ask(lambda server: joined(server.post_stream("/v1/chat/completions", body)))

    assert dflash == plain
    assert plain[0].strip() == "I push."
    assert parsed(plain[1]) == parsed(CALLS)
