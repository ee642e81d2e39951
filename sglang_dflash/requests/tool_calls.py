"""Streamed tool calls: parse the text of a cycle token by token, as it is decoded without speculation.

SGLang's parsers take at most one step for each chunk of a stream, such as the name of one call or a part of its
arguments. They expect chunks of one token. The chunk of a cycle has several, of which they would lose some.
"""

from __future__ import annotations

import functools
import logging
import weakref
from itertools import pairwise

from sglang.srt.function_call.core_types import ToolCallItem
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from transformers import PreTrainedTokenizerBase

from sglang_dflash.server_args.arguments import serves_dflash

logger = logging.getLogger(__name__)

_tokenizers: weakref.WeakKeyDictionary[FunctionCallParser, PreTrainedTokenizerBase] = weakref.WeakKeyDictionary()


def keep_tokenizer(
    result: None,
    parser: FunctionCallParser,
    tools: list,
    tool_call_parser: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **others,
) -> None:
    """AFTER `FunctionCallParser.__init__`: keep the tokenizer for :func:`parse_stream_chunk`."""
    if tokenizer is not None and serves_dflash():
        _tokenizers[parser] = tokenizer


def parse_stream_chunk(original, parser: FunctionCallParser, chunk_text: str) -> tuple[str, list[ToolCallItem]]:
    """AROUND `FunctionCallParser.parse_stream_chunk`: parse the tokens of the chunk one after another."""
    tokenizer = _tokenizers.get(parser)
    if tokenizer is None:
        return original(parser, chunk_text)
    text, calls = "", []
    for token_text in token_texts(chunk_text, tokenizer):
        more_text, more_calls = original(parser, token_text)
        text += more_text or ""
        calls += more_calls
    return text, calls


def token_texts(text: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Divide a text at the beginnings of its tokens. A character of several tokens stays whole."""
    if not tokenizer.is_fast:
        _log_slow_tokenizer(type(tokenizer).__name__)
        return [text]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    begins = sorted({begin for begin, _ in encoded["offset_mapping"]} - {0})
    bounds = [0, *begins, len(text)]
    return [text[begin:end] for begin, end in pairwise(bounds)]


@functools.cache
def _log_slow_tokenizer(name: str) -> None:
    logger.warning(
        "Streamed tool calls are parsed cycle by cycle, not token by token: %s does not say where tokens begin. "
        "SGLang's parsers may lose a part of a call.",
        name,
    )
