"""Streamed tool calls: SGLang's parsers get the text of a cycle token by token."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.plugins import load_plugins
from transformers import AutoTokenizer

from models.tiny import TARGET_DIR
from sglang_dflash.requests import tool_calls

load_plugins()

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": "string"}}}
TOOLS = [
    Tool(type="function", function=Function(name=name, description="", parameters=PARAMETERS))
    for name in ("get_weather", "get_time")
]
CALLS = '{"name": "get_weather", "arguments": {"city": "Tokyo", "unit": "C"}}', '{"name": "get_time", "arguments": {}}'
ANSWERS = {
    "qwen25": "I look at it.\n" + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in CALLS),
    "hermes": "".join(f"<tool_call>\n{call}\n</tool_call>" for call in CALLS),
    "mistral": f"[TOOL_CALLS] [{', '.join(CALLS)}]",
    "llama3": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Tokyo", "unit": "C"}}',
    "glm47": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Tokyo</arg_value></tool_call>"
    "<tool_call>get_time<arg_key>city</arg_key><arg_value>Lima</arg_value></tool_call>",
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET_DIR)


def parse(name: str, chunks: list[str], tokenizer=None) -> tuple[str, list[tuple[str, str]]]:
    """Return text and calls of a stream; with a tokenizer, as a server with DFLASH parses it."""
    parser = FunctionCallParser(TOOLS, name)
    if tokenizer is not None:
        tool_calls._tokenizers[parser] = tokenizer
    text, calls = "", {}
    for chunk in chunks:
        more, found = parser.parse_stream_chunk(chunk)
        text += more
        for item in found:
            call = calls.setdefault(item.tool_index, ["", ""])
            call[0] += item.name or ""
            call[1] += item.parameters or ""
    return text, [tuple(call) for call in calls.values()]


def cycles(texts: list[str], draw: random.Random) -> list[str]:
    """Join the texts of tokens to chunks of 1 to 16 tokens."""
    chunks = []
    while texts:
        size = draw.randint(1, 16)
        chunks.append("".join(texts[:size]))
        texts = texts[size:]
    return chunks


@pytest.mark.parametrize("name", ANSWERS)
def test_chunks_of_several_tokens(name, tokenizer):
    texts, draw = tool_calls.token_texts(ANSWERS[name], tokenizer), random.Random(1)
    assert "".join(texts) == ANSWERS[name] and len(texts) > 20
    expected = parse(name, texts)
    assert expected[1][0][0] == "get_weather" and "Tokyo" in expected[1][0][1]
    streams = [cycles(texts, draw) for _ in range(60)]
    assert all(parse(name, chunks, tokenizer) == expected for chunks in streams)
    # SGLang alone loses text in most of them. Other parsers do so with other tokenizers.
    if name in ("qwen25", "hermes"):
        assert sum(parse(name, chunks) != expected for chunks in streams) > 30


def test_characters_of_several_tokens_stay_whole(tokenizer):
    text = "naïve 漢字 🙂 <tool_call>"
    assert "".join(tool_calls.token_texts(text, tokenizer)) == text
    assert tool_calls.token_texts("", tokenizer) == [""]


def test_a_tokenizer_without_offsets(caplog):
    slow = SimpleNamespace(is_fast=False)
    for _ in range(2):
        assert tool_calls.token_texts("two words", slow) == ["two words"]
    [record] = caplog.records
    assert "SimpleNamespace does not say where tokens begin" in record.getMessage()
