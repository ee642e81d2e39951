"""Random requests. Each is a JSON object with these fields:

* `kind`: `whole`, `stream`, `hang up` (a stream that the client leaves), `abort` (a stream that the client ends by
  `/abort_request`) or `hostile` (a body that means harm).
* `path`, `body`: what is posted. A hostile body may be text that is no JSON, in `raw`.
* `after`: an earlier request that this prompt continues: its round, its index, and the number of tokens of its answer
  to take. The tokens of the body follow them.
* `most_tokens`: largest prompt with which the request fits into the pool.
* `chunks`: number of chunks after which the client leaves or aborts.
"""

from __future__ import annotations

import itertools
import json
import random
from functools import cache
from typing import Any

from grammars import GRAMMARS
from sglang.srt.sampling.custom_logit_processor import (
    DeepseekOCRNoRepeatNGramLogitProcessor,
    DisallowedTokensLogitsProcessor,
)
from test_hostile_requests import NOTHING_LEFT, OPENAI, PROCESSOR_FAILS, PROMPTS, RAW, REFUSED, SERVED, systematic
from transformers import AutoTokenizer

from fuzzing.cases import PAIRS, Case

GRAMMAR_FIELDS = ("regex", "json_schema", "ebnf", "structural_tag")
# Often in the pairs' texts, as they begin, end and lie across tokens.
_STOPS = ["\n", "return", " x", "self.", "(", "):", ", ", "f", "    ", "é", "no such text"]
_STOP_REGEXES = [r"\d+", r"[a-z]+\(", r"\n\s*\n", r"re(turn|f)?", r"(a|b)+c", r"[^\w\s]{3}", r"x{50}"]
_LENGTHS = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 200]


@cache
def _texts(pair: str) -> tuple[list[int], ...]:
    tokenizer = AutoTokenizer.from_pretrained(PAIRS[pair].target)
    return tuple(tokenizer(PAIRS[pair].prompts)["input_ids"])


def draw_rounds(case: Case, chance: random.Random, num_rounds: int = 3, num_requests: int = 12) -> list[list[dict]]:
    rounds: list[list[dict]] = []
    mix = _Mix(case, chance)
    for _ in range(num_rounds):
        rounds.append([mix.draw(rounds) for _ in range(num_requests)])
    return rounds


class _Mix:
    """Source of the requests of one case."""

    def __init__(self, case: Case, chance: random.Random) -> None:
        self._case, self._chance = case, chance
        self._texts = _texts(case.pair)
        self._vocab_size = PAIRS[case.pair].vocab_size
        self._shared_prompts = [self._prompt() for _ in range(2)]
        # A request must fit into the pool by itself, with the pages of two cycles' blocks.
        page = case.flags.get("page-size", 1)
        self._most_tokens = case.pool_tokens - 2 * (case.rows + page) - 2 * page - 16

    def draw(self, earlier: list[list[dict]]) -> dict:
        what = self._chance.random()
        if what < 0.12:
            return self._hostile()
        if what < 0.24:
            return self._openai()
        return self._generate(earlier)

    def _happens(self, probability: float) -> bool:
        return self._chance.random() < probability

    def _prompt(self) -> list[int]:
        text = list(itertools.chain(*self._chance.sample(self._texts, 3)))
        start = self._chance.randrange(20)
        return text[start : start + self._chance.choice(_LENGTHS)]

    def _generate(self, earlier: list[list[dict]]) -> dict:
        chance = self._chance
        kind = chance.choices(["whole", "stream", "hang up", "abort"], [0.65, 0.25, 0.06, 0.04])[0]
        params = self._sampling_params()
        body: dict[str, Any] = {"sampling_params": params} | self._fields()
        if self._happens(0.08):
            field, param = self._processor()
            body |= field
            params |= param
        request: dict[str, Any] = {"kind": kind, "path": "/generate", "body": body}
        answered = [(i, j) for i, row in enumerate(earlier) for j, each in enumerate(row) if "most_tokens" in each]
        if answered and self._happens(0.35):
            where = chance.choice(answered)
            request["after"] = [*where, chance.randrange(60)]
            body["input_ids"] = self._prompt()[: chance.choice([0, 1, 5, 40])]
        elif self._happens(0.3):
            shared = chance.choice(self._shared_prompts)
            body["input_ids"] = shared[: chance.randrange(1, len(shared) + 1)] + self._prompt()[:40]
        elif self._happens(0.1) and kind == "whole":
            body["input_ids"] = [self._prompt() for _ in range(chance.randrange(1, 4))]
        else:
            body["input_ids"] = self._prompt()
        if kind == "whole" and self._happens(0.1):
            params["n"] = chance.choice([2, 3])
        if kind != "whole":
            body["stream"] = True
        if kind in ("hang up", "abort"):
            request["chunks"] = chance.randrange(4)
            params |= {"max_new_tokens": min(300, self._most_tokens - 60), "ignore_eos": True}
            for name in (*GRAMMAR_FIELDS, "stop", "stop_regex", "stop_token_ids"):
                params.pop(name, None)
        if kind == "abort":
            request["chunks"] += 1
            body["rid"] = f"{self._case.seed} {chance.randrange(10**9)}"
        request["most_tokens"] = self._most_tokens - params["max_new_tokens"]
        return request

    def _sampling_params(self) -> dict[str, Any]:
        chance = self._chance
        length = chance.choice([0, 1, 2, chance.randrange(3, 20), *(chance.randrange(20, 100) for _ in range(4))])
        params: dict[str, Any] = {"temperature": 0, "max_new_tokens": length}
        if self._happens(0.35):
            params["temperature"] = chance.choice([0.3, 0.7, 1.0, 1.6])
            filters = {"top_k": chance.choice([1, 5, 40, -1]), "top_p": chance.choice([0.3, 0.9, 1.0])}
            if not self._case.is_seeded:
                filters["min_p"] = chance.choice([0.0, 0.05, 0.4])
            params |= {name: value for name, value in filters.items() if self._happens(0.4)}
            params["sampling_seed"] = chance.randrange(1000)
        optional: dict[str, Any] = {
            "frequency_penalty": round(chance.uniform(-0.5, 1.5), 2),
            "presence_penalty": round(chance.uniform(-0.5, 1.5), 2),
            "repetition_penalty": round(chance.uniform(0.8, 1.6), 2),
            "min_new_tokens": chance.randrange(length + 1),
            "logit_bias": {
                str(chance.randrange(self._vocab_size)): round(chance.uniform(-100, 6), 1)
                for _ in range(chance.randrange(1, 4))
            },
            "stop": chance.choice([chance.choice(_STOPS), chance.sample(_STOPS, 3)]),
            "stop_regex": chance.choice([chance.choice(_STOP_REGEXES), chance.sample(_STOP_REGEXES, 2)]),
            "stop_token_ids": [chance.randrange(self._vocab_size) for _ in range(20)],
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
            "stream_interval": chance.choice([1, 3, 20]),
        }
        params |= {name: value for name, value in optional.items() if self._happens(0.09)}
        if self._happens(0.4):
            params["ignore_eos"] = True
        if self._happens(0.15):
            params |= GRAMMARS[chance.choice(list(GRAMMARS))]
            # A grammar that ends before so many tokens leaves none to choose.
            params.pop("min_new_tokens", None)
        return params

    def _fields(self) -> dict[str, Any]:
        chance = self._chance
        fields: dict[str, Any] = {}
        if self._happens(0.25):
            fields["return_logprob"] = True
            if self._happens(0.5):
                fields["top_logprobs_num"] = chance.choice([1, 2, 5])
            if self._happens(0.3):
                fields["token_ids_logprob"] = [chance.randrange(self._vocab_size) for _ in range(3)]
            if self._happens(0.3):
                fields["logprob_start_len"] = chance.choice([0, 3, 30])
            if self._happens(0.3):
                fields["return_text_in_logprobs"] = True
        if self._happens(0.15):
            fields["return_hidden_states"] = chance.choice([True, "last"])
        if "enable-priority-scheduling" in self._case.flags and self._happens(0.5):
            fields["priority"] = chance.randrange(3)
        if self._happens(0.1):
            fields["extra_key"] = chance.choice(["a", "b"])
        if self._happens(0.05):
            fields["return_prompt_token_ids"] = True
        return fields

    def _processor(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the request field and the sampling parameter of a custom logit processor."""
        if self._happens(0.5):
            # Without speculation, SGLang ends if two of them in a batch have other tokens.
            return (
                {"custom_logit_processor": DisallowedTokensLogitsProcessor.to_str()},
                {"custom_params": {"token_ids": [200, 263, 296]}},
            )
        return (
            {"custom_logit_processor": DeepseekOCRNoRepeatNGramLogitProcessor.to_str()},
            {"custom_params": {"ngram_size": 3, "window_size": 100}},
        )

    def _openai(self) -> dict:
        chance = self._chance
        text = chance.choice(PAIRS[self._case.pair].prompts)[: chance.choice([1, 20, 150])]
        body: dict[str, Any] = {"model": "any", "temperature": 0, "max_tokens": chance.choice([1, 5, 30, 60])}
        is_chat = self._happens(0.5)
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        if is_chat:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        optional: dict[str, Any] = {
            "stop": chance.choice(_STOPS),
            "n": 2,
            "frequency_penalty": 0.4,
            "presence_penalty": 0.7,
            "min_tokens": 1,
            "logit_bias": {"263": 3.0},
            "ignore_eos": True,
            "logprobs": True if is_chat else 3,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": json.loads(GRAMMARS["json_schema"]["json_schema"])},
            },
            "stop_regex": chance.choice(_STOP_REGEXES),
            "return_hidden_states": True,
        }
        if not is_chat:
            optional["echo"] = True
        body |= {name: value for name, value in optional.items() if self._happens(0.12)}
        if is_chat and body.get("logprobs") and self._happens(0.5):
            body["top_logprobs"] = 3
        kind = "whole"
        if self._happens(0.3):
            kind, body["stream"] = "stream", True
            body["stream_options"] = {"include_usage": True}
        return {"kind": kind, "path": path, "body": body}

    def _hostile(self) -> dict:
        chance = self._chance
        what = chance.randrange(6)
        if what == 0:
            path = chance.choice(["/generate", "/v1/completions"])
            return {"kind": "hostile", "path": path, "raw": chance.choice(RAW).decode("latin-1")}
        if what == 1:
            path, body = chance.choice(OPENAI)
            return {"kind": "hostile", "path": path, "body": {"model": "any", "max_tokens": 4} | body}
        known = [
            list(NOTHING_LEFT.values()),
            [each for bodies in REFUSED.values() for each in bodies],
            [*PROCESSOR_FAILS.values(), *SERVED.values()],
            [{"sampling_params": {"max_new_tokens": 4}} | prompt for prompt in PROMPTS],
        ]
        bodies = _systematic() if what == 2 else chance.choice(known)
        return {"kind": "hostile", "path": "/generate", "body": chance.choice(bodies)}


@cache
def _systematic() -> list[dict]:
    return systematic()
