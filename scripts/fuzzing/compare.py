"""Comparison of answers with DFLASH and without speculation, and the exceptions it makes."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from serving import Pair, Server

from fuzzing.asking import Outcome, ask
from fuzzing.cases import PAIRS, Case
from fuzzing.mixes import GRAMMAR_FIELDS

# For float32 on a CPU.
TOLERANCE = {"logprob": 2e-4, "hidden_states": 2e-3}
# Log probabilities of the two best tokens that are this close may change order by rounding.
TIE = 1e-4
# SGLang takes so long at most to end after its scheduler has.
_DIAGNOSTICS_SECONDS = 20
# Allowed for hostile bodies.
_STATUSES = (200, 400, 404, 405, 413, 415, 422)

# Allowed differences by name, each with its reason, from docs/requests.md and docs/limits.md. The code below refers to
# the names. A run prints how often it used each.
EXCEPTIONS: dict[str, str] = {
    "sampled by chance": "A sampled answer without an effective seed has the target's distribution. Only its form is "
    "checked.",
    "repetition penalty with another": "SGLang without overlap takes the penalties of a request in the order of a "
    "Python set; DFLASH takes the repetition penalty last.",
    "tokens after a grammar": "With ignore_eos SGLang notices the end of a grammar one token late with xgrammar, and "
    "never with llguidance.",
    "tied log probabilities": "Of tokens whose log probabilities are the same up to 1e-4, any may be named first.",
    "greedy by top_k": "With a top_k of 1 and a temperature, SGLang divides by the temperature only beside sampled "
    "requests. Log probabilities then depend on the batch.",
    "processor against grammar": "Where a custom logit processor rules out what a grammar asks for, DFLASH ends the "
    "request with an error. SGLang chooses a token against the grammar.",
    "late stop": "SGLang may notice a stop string of spaces late, at the beginning of an answer. A stream has the text "
    "that was sent before, which depends on its chunks.",
    "penalties after a retraction": "SGLang without speculation counts penalties anew once a request was retracted. "
    "DFLASH counts them over the whole answer.",
    "plain server ended": "SGLang without speculation ended, and the server with DFLASH did not.",
    "log probability of no token": "With max_new_tokens of 0 there may be one log probability more.",
    "full pool": "A request that nearly fills the pool ends as early as its next two blocks might not fit.",
    "near tie": "Rounding decides between two tokens whose log probabilities are the same up to 1e-4.",
    "hung up": "Of an answer that the client left or aborted, its tokens so far are compared.",
    "retracted hidden states": "A request that was retracted has hidden states of its recomputed prompt once more.",
    "prompt's own states": "Hidden states and log probabilities of a prompt are of the part that the prefix cache does "
    "not have and, of states, that the last chunk has; both depend on the layout.",
}
_PENALTIES = {"frequency_penalty", "presence_penalty", "repetition_penalty"}
# Fields that describe a server or a moment, in the meta_info of /generate and in OpenAI's answers.
_OWN_FIELDS = re.compile(
    r"^(id|created|e2e_latency|num_retractions|cached_tokens.*|spec_.*|prompt_tokens_details|metadata|sglext|meta_info"
    r"|.*_(time|latency|ts|throughput|wait)|dp_rank)$"
)


@dataclass(frozen=True)
class Difference:
    """A field with two values.

    Attributes:
        where: path of the field, such as `meta_info.output_token_logprobs[3][0]`.
        dflash, plain: its values with DFLASH and without speculation.
    """

    where: str
    dflash: Any
    plain: Any

    @property
    def kind(self) -> str:
        """Path without indices. It stays the same while a request is shrunk."""
        return re.sub(r"\[-?\d+\]", "", self.where)

    def __str__(self) -> str:
        return f"{self.where}: {_shown(self.dflash)} with DFLASH, {_shown(self.plain)} without"


def _ends(server: Server) -> bool:
    """Return True if a server that does not answer has ended, or ends while SGLang writes its diagnostics."""
    deadline = time.monotonic() + _DIAGNOSTICS_SECONDS
    while server.is_running() and time.monotonic() < deadline:
        time.sleep(0.2)
    return not server.is_running()


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


class Comparison:
    """Comparison of the outcomes of one case. Counts the exceptions it makes."""

    def __init__(self, pair: Pair, case: Case) -> None:
        self._pair, self._case = pair, case
        self.excused: Counter[str] = Counter()

    def differences(self, request: dict, dflash: Outcome, plain: Outcome) -> list[Difference]:
        """Return the differences of one request, the most telling first."""
        if request["kind"] == "hostile":
            fine = dflash["status"] in _STATUSES
            return [] if fine else [Difference("status", dflash["status"], f"one of {_STATUSES}")]
        if str(plain["status"]).startswith("no answer") and _ends(self._pair.plain):
            self._excuse("plain server ended")
            return []
        is_ruled_out = dflash["status"] == 400 and _is_ruled_out(request["body"], dflash["answer"])
        # Sampled by chance, the other answer may never have come to such a token. A greedy one gets the first token.
        may_end = self._is_by_chance(request["body"]) or _ends_with_first_token(plain["answer"])
        if is_ruled_out and plain["status"] in ((200, 500) if may_end else (500,)):
            self._excuse("processor against grammar")
            return []
        if dflash["status"] != plain["status"]:
            return [Difference("status", [dflash["status"], dflash["answer"]], [plain["status"], plain["answer"]])]
        if dflash["status"] != 200:
            return []
        if request["path"] != "/generate":
            return list(self._openai_differences(request["body"], dflash["answer"], plain["answer"]))
        if "chunks" in dflash:
            bad = list(_chunk_differences(dflash["chunks"]))
            if bad:
                return bad
        if request["kind"] in ("hang up", "abort"):
            return list(self._left(request, dflash["answer"], plain["answer"]))
        mine, expected = _answers(dflash["answer"]), _answers(plain["answer"])
        if len(mine) != len(expected):
            return [Difference("answers", len(mine), len(expected))]
        found: list[Difference] = []
        for i, (each, other) in enumerate(zip(mine, expected, strict=True)):
            where = f"answer[{i}]." if len(mine) > 1 else ""
            found += self._answer_differences(request, each, other, where)
        return found

    def _excuse(self, name: str) -> None:
        assert name in EXCEPTIONS
        self.excused[name] += 1

    def _openai_differences(self, body: dict, mine: dict, expected: dict) -> Iterator[Difference]:
        if body.get("ignore_eos") and _has_grammar(body):
            pairs = list(zip(mine["choices"], expected["choices"], strict=True))
            late = [i for i, (each, other) in enumerate(pairs) if _ends_earlier(each, other)]
            if late:
                self._excuse("tokens after a grammar")
                mine, expected = (_without_choices(answer, late) for answer in (mine, expected))
        for each, other in zip(mine["choices"], expected["choices"], strict=False):
            if body.get("stream") and _has_late_stop(body.get("stop"), each, other):
                self._excuse("late stop")
                for choice in (each, other):
                    choice.pop("text", None), choice.pop("message", None)
        if body.get("return_hidden_states"):
            # A last token that comes with a recomputed prompt has that prompt's states, which end with its own.
            for choice in (choice for answer in (mine, expected) for choice in answer["choices"]):
                states = choice.get("hidden_states")
                if states and _rows(states) is states:
                    self._excuse("retracted hidden states")
                    choice["hidden_states"] = states[-1]
        for tops, others in zip(_openai_tops(mine), _openai_tops(expected), strict=False):
            if tops.keys() != others.keys() and _are_tied_by_name(tops, others):
                self._excuse("tied log probabilities")
                tops.clear()
                others.clear()
        yield from _tree_differences(mine, expected, "")

    def _is_by_chance(self, body: dict) -> bool:
        """Return True if two servers need not draw the same tokens."""
        # An OpenAI body has its parameters beside the others.
        return body.get("sampling_params", body).get("temperature", 1) > 0 and not self._case.is_seeded

    def _answer_differences(self, request: dict, mine: dict, expected: dict, where: str) -> list[Difference]:
        params = request["body"]["sampling_params"]
        refused = [_is_refused(answer) for answer in (mine, expected)]
        if any(refused):
            if refused == [True, False] and _is_ruled_out(request["body"], mine):
                self._excuse("processor against grammar")
                return []
            return [] if all(refused) else [Difference(f"{where}error", mine, expected)]
        form = list(self._form_differences(request["body"], mine, where))
        if form:
            return form
        by_chance = self._is_by_chance(request["body"])
        penalties = _PENALTIES & set(params)
        mixed = "repetition_penalty" in penalties and len(penalties) > 1
        if by_chance or mixed:
            self._excuse("sampled by chance" if by_chance else "repetition penalty with another")
            return []
        if penalties and expected["meta_info"]["num_retractions"]:
            self._excuse("penalties after a retraction")
            return []
        tokens, others = mine["output_ids"], expected["output_ids"]
        if tokens != others:
            return self._token_differences(request, mine, expected, where)
        found = []
        if mine["text"] != expected["text"]:
            found.append(Difference(f"{where}text", mine["text"], expected["text"]))
        return found + list(self._meta_differences(request, mine["meta_info"], expected["meta_info"], where))

    def _form_differences(self, body: dict, answer: dict, where: str) -> Iterator[Difference]:
        """Check an answer by itself."""
        params, meta = body["sampling_params"], answer["meta_info"]
        vocab_size = PAIRS[self._case.pair].vocab_size
        tokens, reason = answer["output_ids"], meta["finish_reason"]
        if meta["completion_tokens"] != len(tokens):
            yield Difference(
                f"{where}meta_info.completion_tokens", meta["completion_tokens"], f"{len(tokens)} output_ids"
            )
        if len(tokens) > params["max_new_tokens"]:
            yield Difference(f"{where}output_ids.length", len(tokens), f"at most {params['max_new_tokens']}")
        if not all(0 <= token < vocab_size for token in tokens):
            yield Difference(f"{where}output_ids", tokens, f"tokens below {vocab_size}")
        if reason is None or reason["type"] not in ("stop", "length"):
            yield Difference(f"{where}finish_reason", reason, "stop or length")
        elif reason["type"] == "stop" and len(tokens) < params.get("min_new_tokens", 0) and not _has_text_stop(params):
            yield Difference(f"{where}output_ids.length", len(tokens), f"at least {params['min_new_tokens']}")
        if body.get("return_logprob") and tokens and len(meta["output_token_logprobs"]) != len(tokens):
            yield Difference(
                f"{where}meta_info.output_token_logprobs.length", len(meta["output_token_logprobs"]), tokens
            )
        if body.get("return_hidden_states") and tokens and not meta.get("hidden_states"):
            yield Difference(f"{where}meta_info.hidden_states", meta.get("hidden_states", "missing"), "asked for")

    def _token_differences(self, request: dict, mine: dict, expected: dict, where: str) -> list[Difference]:
        params = request["body"]["sampling_params"]
        tokens, others = mine["output_ids"], expected["output_ids"]
        reason = mine["meta_info"]["finish_reason"]
        if (
            params.get("ignore_eos")
            and _has_grammar(params)
            and reason["type"] == "stop"
            and tokens == others[: len(tokens)]
        ):
            self._excuse("tokens after a grammar")
            return []
        if reason["type"] == "length" and tokens == others[: len(tokens)]:
            held = mine["meta_info"]["prompt_tokens"] + len(tokens)
            page = self._case.flags.get("page-size", 1)
            if held + 2 * (self._case.rows + page) >= self._case.pool_tokens:
                self._excuse("full pool")
                return []
        part = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), None)
        if part is None:
            part = min(len(tokens), len(others))
        elif self._is_tie(request, part):
            self._excuse("near tie")
            return []
        mine_part, others_part = tokens[part : part + 5], others[part : part + 5]
        return [Difference(f"{where}output_ids[{part}]", [mine_part, reason], [others_part, expected["meta_info"]])]

    def _is_tie(self, request: dict, position: int) -> bool:
        """Return True if the server without speculation hardly prefers its token to the next best one."""
        body = request["body"]
        if isinstance(body["input_ids"][0], list) or "n" in body["sampling_params"]:
            return False
        body = body | {"return_logprob": True, "top_logprobs_num": 2, "stream": False}
        outcome = ask(self._pair.plain, {"kind": "whole", "path": "/generate", "body": body})
        if outcome["status"] != 200:
            return False
        best, second = outcome["answer"]["meta_info"]["output_top_logprobs"][position][:2]
        return best[0] - second[0] < TIE

    def _left(self, request: dict, mine: dict | None, expected: dict | None) -> Iterator[Difference]:
        self._excuse("hung up")
        params = request["body"]["sampling_params"]
        if mine is None or params["temperature"] > 0 or "repetition_penalty" in params:
            return
        # The last chunk of an aborted stream may have none.
        tokens, others = mine.get("output_ids") or [], expected["output_ids"]
        if tokens != others[: len(tokens)]:
            yield Difference("output_ids", tokens, others[: len(tokens)])

    def _meta_differences(self, request: dict, mine: dict, expected: dict, where: str) -> Iterator[Difference]:
        fields = {name for name in (*mine, *expected) if not _OWN_FIELDS.match(name)}
        params = request["body"]["sampling_params"]
        if params.get("top_k") == 1 and params.get("temperature", 1) not in (0, 1):
            self._excuse("greedy by top_k")
            fields = {name for name in fields if not re.match("output_.*logprobs", name)}
        for name in sorted(fields):
            path = f"{where}meta_info.{name}"
            if name not in mine or name not in expected:
                yield Difference(path, mine.get(name, "missing"), expected.get(name, "missing"))
            elif name == "hidden_states":
                yield from self._state_differences(request, mine, expected, path)
            elif name.startswith("input_"):
                yield from self._prompt_differences(mine[name], expected[name], path)
            elif name == "output_top_logprobs" and mine["completion_tokens"]:
                yield from self._top_differences(mine[name], expected[name], path)
            elif name.startswith("output_") and not mine["completion_tokens"]:
                self._excuse("log probability of no token")
            else:
                yield from _tree_differences(mine[name], expected[name], path)

    def _top_differences(self, mine: list, expected: list, where: str) -> Iterator[Difference]:
        """Compare the best tokens of each position: [log probability, token, text], the best first."""
        if len(mine) != len(expected):
            yield Difference(f"{where}.length", len(mine), len(expected))
            return
        for i, (tops, others) in enumerate(zip(mine, expected, strict=True)):
            if _names(tops) != _names(others) and _are_tied(tops, others):
                self._excuse("tied log probabilities")
            else:
                yield from _tree_differences(tops, others, f"{where}[{i}]")

    def _prompt_differences(self, mine: Any, expected: Any, where: str) -> Iterator[Difference]:
        if isinstance(mine, list) and isinstance(expected, list) and len(mine) != len(expected):
            self._excuse("prompt's own states")
            shorter = min(len(mine), len(expected))
            mine, expected = mine[len(mine) - shorter :], expected[len(expected) - shorter :]
        yield from _tree_differences(mine, expected, where)

    def _state_differences(self, request: dict, mine: dict, expected: dict, where: str) -> Iterator[Difference]:
        """Compare hidden states: one item for each token of the answer.

        An item is one state, or a list of states that ends with it, after a prefill. The token was chosen from that
        state. A prefill has the states of the prompt tokens of its last chunk. A request that was retracted has such a
        list where it was resumed.
        """
        states, others = mine["hidden_states"], expected["hidden_states"]
        if request["body"]["return_hidden_states"] == "last":
            yield from _tree_differences(states, others, where)
            return
        if mine["num_retractions"]:
            self._excuse("retracted hidden states")
        if len(states) != len(others):
            yield Difference(f"{where}.length", len(states), len(others))
            return
        for i in range(1, len(states) + 1):
            rows, other_rows = _rows(states[-i]), _rows(others[-i])
            shorter = min(len(rows), len(other_rows))
            if len(rows) != len(other_rows):
                self._excuse("prompt's own states")
            yield from _tree_differences(rows[-shorter:], other_rows[-shorter:], f"{where}[-{i}]")


def _answers(answer: Any) -> list[dict]:
    return answer if isinstance(answer, list) else [answer]


def _has_grammar(params: dict) -> bool:
    """Return True for parameters of a request, or an OpenAI body, with a grammar."""
    return any(name in params for name in ("response_format", *GRAMMAR_FIELDS))


def _ends_earlier(mine: dict, expected: dict) -> bool:
    """Return True if a choice of an OpenAI answer is another one's beginning, and ends where its grammar does."""
    texts = [
        choice["text"] if "text" in choice else choice.get("message", choice)["content"] for choice in (mine, expected)
    ]
    return mine["finish_reason"] == "stop" and texts[1].startswith(texts[0])


def _without_choices(answer: dict, left_out: list[int]) -> dict:
    """Return an OpenAI answer without some of its choices, and without the number of its tokens."""
    choices = [choice for i, choice in enumerate(answer["choices"]) if i not in left_out]
    return {name: value for name, value in answer.items() if name != "usage"} | {"choices": choices}


def _names(tops: list | None) -> list[int]:
    return [token for _, token, _ in tops or ()]


def _are_tied(mine: list, expected: list) -> bool:
    """Return True if two lists of the best tokens have the same values, and differ in tokens of equal values only."""
    values, others = ([_number(value) for value, _, _ in tops or ()] for tops in (mine, expected))
    if len(values) != len(others) or not all(map(_is_close, values, others)):
        return False
    return _are_tied_by_name(*({token: value for value, token, _ in tops} for tops in (mine, expected)))


def _openai_tops(answer: dict) -> Iterator[dict[str, float | None]]:
    """Yield the log probability of each named text, for each position of each choice."""
    for choice in answer["choices"]:
        logprobs = choice.get("logprobs") or {}
        yield from (tops for tops in logprobs.get("top_logprobs") or () if tops)
        for position in logprobs.get("content") or ():
            # A chat has a list of tokens.
            tops = {top["token"]: top["logprob"] for top in position["top_logprobs"]}
            if tops:
                position["top_logprobs"] = tops
                yield tops


def _are_tied_by_name(mine: dict[Any, float | None], expected: dict[Any, float | None]) -> bool:
    """Return True if two sets of the best tokens differ only in tokens that tie with the last one.

    Such tokens may have been left out. Tokens of the same text share an entry, so that the numbers of entries may
    differ.
    """
    mine, expected = ({name: _number(value) for name, value in tops.items()} for tops in (mine, expected))
    least, other_least = min(mine.values()), min(expected.values())
    certain, same = (
        {name: value for name, value in tops.items() if value > of + TIE}
        for tops, of in ((mine, least), (expected, other_least))
    )
    return (
        _is_close(least, other_least)
        and certain.keys() == same.keys()
        and all(_is_close(certain[name], same[name]) for name in certain)
    )


def _number(logprob: float | None) -> float:
    """Return a log probability. No number stands for minus infinity."""
    return -math.inf if logprob is None else logprob


def _is_close(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=0, abs_tol=TIE)


def _is_refused(answer: dict) -> bool:
    """Return True for an error, also for one at the end of a stream, whose status is 200."""
    return "error" in answer or (answer["meta_info"]["finish_reason"] or {}).get("status_code") == 400


def _is_ruled_out(body: dict, answer: Any) -> bool:
    """Return True for the error of a request whose custom logit processor and grammar leave no token."""
    # An OpenAI body has its parameters beside the others.
    has_both = _has_grammar(body.get("sampling_params", body)) and "custom_logit_processor" in body
    return has_both and "No token is left to choose" in str(answer)


def _has_late_stop(stop: str | list[str] | None, mine: dict, expected: dict) -> bool:
    """Return True if both choices have stopped, one text begins with the other, and the longer has a stop string."""
    texts = sorted(
        (choice.get("text") or choice.get("message", {}).get("content") or "" for choice in (mine, expected)), key=len
    )
    has_stopped = mine["finish_reason"] == expected["finish_reason"] == "stop"
    stops = [stop] if isinstance(stop, str) else stop or []
    return has_stopped and texts[1].startswith(texts[0]) and any(each and each in texts[1] for each in stops)


def _ends_with_first_token(answer: Any) -> bool:
    """Return True for an answer of `/generate` that token 0 has ended: the best one if all are ruled out."""
    return isinstance(answer, dict) and answer.get("output_ids", [])[-1:] == [0]


def _rows(states: list) -> list[list[float]]:
    return states if states and isinstance(states[0], list) else [states]


def _has_text_stop(params: dict) -> bool:
    return "stop" in params or "stop_regex" in params


def _chunk_differences(chunks: list[dict]) -> Iterator[Difference]:
    """Check the chunks of a stream. Each has the whole answer so far."""
    lengths = [chunk["output_ids"] for chunk in chunks if chunk.get("output_ids")]
    for i, (tokens, later) in enumerate(itertools.pairwise(lengths)):
        if tokens != later[: len(tokens)]:
            yield Difference(f"chunks[{i}].output_ids", tokens, f"the beginning of {later}")


def _tree_differences(mine: Any, expected: Any, where: str) -> Iterator[Difference]:
    """Yield the first difference in each branch. Floats may differ by rounding."""
    if isinstance(mine, dict) and isinstance(expected, dict):
        for name in sorted({*mine, *expected}):
            if _OWN_FIELDS.match(name):
                continue
            if name not in mine or name not in expected:
                yield Difference(f"{where}.{name}", mine.get(name, "missing"), expected.get(name, "missing"))
            else:
                yield from _tree_differences(mine[name], expected[name], f"{where}.{name}".lstrip("."))
    elif isinstance(mine, list) and isinstance(expected, list):
        if len(mine) != len(expected):
            yield Difference(f"{where}.length", len(mine), len(expected))
            return
        for i, (each, other) in enumerate(zip(mine, expected, strict=True)):
            found = list(_tree_differences(each, other, f"{where}[{i}]"))
            if found:
                yield found[0]
                return
    elif isinstance(mine, float) and isinstance(expected, float):
        tolerance = TOLERANCE["hidden_states" if "hidden_states" in where else "logprob"]
        if abs(mine - expected) > tolerance * max(1.0, abs(expected)):
            yield Difference(where, mine, expected)
    elif mine != expected:
        yield Difference(where, mine, expected)
