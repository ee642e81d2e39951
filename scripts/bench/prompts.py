"""Prompts of benchmarks: lines of a dataset, text cut to a length, or random tokens for dummy weights."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.pairs import TINY_PAIR

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The dataset of the tiny pair: beginnings of Python modules that it was not trained on.
TINY_PROMPTS = "tiny-prompts"
# Dataset of random tokens, for pairs that can be asked for text too.
RANDOM_IDS = "random-ids"

# Names of the field with the question, in order of preference: HumanEval, GSM8K, MATH-500, MT-Bench.
_QUESTION_FIELDS = ("prompt", "question", "problem", "turns")
_GSM8K_MARK = "####"
_GSM8K_INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


@dataclass(frozen=True)
class Prompts:
    """A set of prompts.

    Attributes:
        dataset: path of a JSONL file, `TINY_PROMPTS`, or None for random tokens.
        tokens: length to cut every prompt to; None to keep prompts whole.
    """

    dataset: str | None
    tokens: int | None

    def __str__(self) -> str:
        name = [] if self.dataset is None else [Path(self.dataset).stem]
        return ", ".join(name + ([] if self.tokens is None else [f"{self.tokens} tokens"]))

    @classmethod
    def parse(cls, text: str) -> Prompts:
        """Return the prompts that `str` wrote as `text`. The dataset is only its file's name."""
        dataset, tokens = re.fullmatch(r"(.*?)(?:(?:, |^)(\d+) tokens)?", text).groups()
        return cls(dataset or None, None if tokens is None else int(tokens))


@dataclass(frozen=True)
class Question:
    """One line of a dataset. `answer` is the number that GSM8K gives."""

    text: str
    answer: str | None = None


@dataclass(frozen=True)
class Prompt:
    input_ids: list[int]
    answer: str | None = None


def read_dataset(path: str) -> list[Question]:
    """Return the questions of a JSONL file, of MT-Bench the first turns.

    Raises:
        ValueError: a line cannot be read. The message names file and line.
    """
    if path == TINY_PROMPTS:
        return [Question(text) for text in json.loads((TINY_PAIR / "prompts.json").read_text())]
    questions = []
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is not JSON: {error}") from error
        field = next((name for name in _QUESTION_FIELDS if name in row), None)
        if field is None:
            raise ValueError(f"{path}:{number} has none of the fields {', '.join(_QUESTION_FIELDS)}.")
        text = row[field][0] if field == "turns" else row[field]
        solution = str(row.get("answer", ""))
        if _GSM8K_MARK in solution:
            questions.append(Question(text + _GSM8K_INSTRUCTION, final_number(solution.rpartition(_GSM8K_MARK)[2])))
        else:
            questions.append(Question(text))
    if not questions:
        raise ValueError(f"{path} is empty.")
    return questions


def serving_format(path: str) -> str | None:
    """Return the `--dataset-name` with which bench_serving reads a file; None for files of `read_dataset`.

    "sharegpt" is a JSON list of conversations. "custom" and "openai" have a conversation or a request in every line.
    """
    if path == TINY_PROMPTS:
        return None
    with Path(path).open() as file:
        line = next((line for line in file if line.strip()), "")
    if line.lstrip().startswith("["):
        return "sharegpt"
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None  # `read_dataset` reports the error.
    if "messages" in row:
        return "openai"
    return "custom" if "conversations" in row or "conversation" in row else None


def final_number(text: str) -> str | None:
    """Return the number in the last `\\boxed{}`, else the last number of a text. Separators and trailing zeros go."""
    boxed = [number for content in _BOXED.findall(text) for number in _NUMBER.findall(content)]
    numbers = boxed or _NUMBER.findall(text)
    if not numbers:
        return None
    number = numbers[-1].replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def build_prompts(
    prompts: Prompts, tokenizer: PreTrainedTokenizerBase | None, count: int, chat_arguments: dict
) -> list[Prompt]:
    """Return prompts as token ids.

    Args:
        prompts: the set of prompts.
        tokenizer: the target's; None for dummy weights.
        count: fewest prompts to return if they are cut to a length.
        chat_arguments: for the tokenizer's chat template, if it has one.
    """
    if prompts.dataset is None:
        rng = random.Random(0)
        return [Prompt([rng.randrange(100, 4000) for _ in range(prompts.tokens)]) for _ in range(count)]
    # The tiny pair continues a module's text. It has a chat template for chat clients only.
    is_chat = tokenizer.chat_template is not None and prompts.dataset != TINY_PROMPTS
    questions = [
        Prompt(
            tokenize_chat(tokenizer, question.text, chat_arguments)
            if is_chat
            else tokenizer(question.text)["input_ids"],
            question.answer,
        )
        for question in read_dataset(prompts.dataset)
    ]
    if prompts.tokens is None:
        return questions
    return [Prompt(ids) for ids in cut([question.input_ids for question in questions], prompts.tokens, count)]


def tokenize_chat(tokenizer: PreTrainedTokenizerBase, text: str, chat_arguments: dict) -> list[int]:
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False, **chat_arguments
    )


def cut(texts: list[list[int]], tokens: int, count: int) -> list[list[int]]:
    """Return `count` prompts of `tokens` ids: the texts one after another, starting with a different text each."""
    prompts = []
    for i in range(count):
        ids: list[int] = []
        first = i
        while len(ids) < tokens:
            ids += texts[first % len(texts)]
            first += 1
        prompts.append(ids[:tokens])
    return prompts
