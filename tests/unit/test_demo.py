"""Marks of the demo in a streamed answer."""

import demo
import pytest
from transformers import AutoTokenizer

from models.tiny import TARGET_DIR

TEXT = "def push(self, value):  # ünïcode\n    return 1"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET_DIR)


def show(tokenizer, lengths, num_cycles, num_correct_drafts, coloured=False):
    """Return the view of TEXT's tokens, in chunks that end at `lengths`."""
    view = demo.TokenView(tokenizer, coloured)
    tokens = tokenizer.encode(TEXT)
    for length in lengths:
        meta_info = {"finish_reason": None}
        if length == lengths[-1]:
            meta_info = {"finish_reason": {"type": "length"}, "spec_num_correct_drafts": num_correct_drafts}
        view.show({"output_ids": tokens[:length], "meta_info": meta_info})
    view.end(num_cycles)


def test_drafts_are_marked(tokenizer, capsys):
    tokens = tokenizer.encode(TEXT)
    show(tokenizer, [1, 4, 5, len(tokens)], 3, 2 + len(tokens) - 6)

    first, drafted, own = (tokenizer.decode(part) for part in (tokens[:1], tokens[1:3], tokens[3:5]))
    rest, last = tokenizer.decode(tokens[5:-1]), tokenizer.decode(tokens[-1:])
    assert capsys.readouterr().out == f"{first}[{drafted}]{own}[{rest}]{last}"


def test_a_cycle_that_was_cut_ends_with_a_draft(tokenizer, capsys):
    num_tokens = len(tokenizer.encode(TEXT))
    show(tokenizer, [1, num_tokens], 1, num_tokens - 1, coloured=True)

    out = capsys.readouterr().out
    assert out.endswith("\033[0m") and out.count("\033[32m") == 1
    assert out.replace("\033[32m", "").replace("\033[0m", "") == TEXT


def test_joined_cycles_are_told(tokenizer, capsys):
    show(tokenizer, [1, len(tokenizer.encode(TEXT))], 3, 4)

    assert "2 cycles arrived with the next one" in capsys.readouterr().out


def test_without_drafts_nothing_is_marked(tokenizer, capsys):
    num_tokens = len(tokenizer.encode(TEXT))
    show(tokenizer, range(1, num_tokens + 1), num_tokens - 1, 0)

    assert capsys.readouterr().out == TEXT
