"""Search for `stop_regex` in linear time, so that no pattern blocks the scheduler.

SGLang searches the end of every answer in the scheduler's process, with `re`, which backtracks. A pattern like `(a+)+b`
takes time exponential in the text, during which no request gets a token. Here `re` searches for patterns with few ways
to match only. Other patterns run as a nondeterministic automaton, which reads each character of an answer once
(Thompson, Regular Expression Search Algorithm, 1968). It uses `re` for single characters, so the meaning of a pattern
is the same. Patterns with back-references or look-around that may take long are refused.
"""

from __future__ import annotations

import re
import weakref
from dataclasses import dataclass, field
from functools import lru_cache
from re import _compiler, _constants, _parser

from sglang.srt.managers.schedule_batch import FINISHED_MATCHED_REGEX, Req
from sglang.srt.sampling.sampling_params import MAX_STOP_REGEX_LEN

from sglang_dflash.server_args.arguments import serves_dflash

# Limits on the ways in which `re` may match a pattern from one position, and on the states of an automaton. A search
# within either limit takes milliseconds at most.
MAX_WAYS, MAX_STATES = 100, 1000
# `$` and `\\b` of a pattern depend on up to two characters that follow, which must not change any more.
_LOOKAHEAD = 2

_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
_ASSERTIONS = (_constants.ASSERT, _constants.ASSERT_NOT)
# One character, or none.
_CHARACTERS = (_constants.LITERAL, _constants.NOT_LITERAL, _constants.ANY, _constants.IN)


def check_stop_regex(pattern: str) -> None:
    """Raise ValueError if a pattern is invalid or cannot be searched for in linear time."""
    if len(pattern.encode("utf-8", "surrogatepass")) > MAX_STOP_REGEX_LEN:
        raise ValueError(f"stop_regex={pattern[:20]!r}... is longer than {MAX_STOP_REGEX_LEN} bytes: shorten it.")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"stop_regex={pattern!r} is not a regular expression: {error}.") from error
    automaton(pattern)


@lru_cache(maxsize=1024)
def automaton(pattern: str) -> Automaton | None:
    """Return the automaton of a pattern, or None if `re` searches for it.

    Raises:
        ValueError: the pattern needs an automaton that is too large, or has parts that no automaton can match.
    """
    tree = _parser.parse(pattern)
    if _ways(tree) <= MAX_WAYS:
        return None
    builder = _Builder(tree.state, pattern)
    start = builder.sequence(tree, tree.state.flags, builder.accept)
    return Automaton(builder.states, start)


def _ways(tree: _parser.SubPattern) -> int:
    """Return an upper bound on the ways in which `re` may match from one position, capped at `MAX_WAYS + 1`."""
    ways = 1
    for kind, value in tree:
        inner = 1
        if kind in _REPEATS:
            least, most, body = value
            once = _ways(body)
            # Each number of repetitions is another way, and each way to match the body in each of them.
            inner = sum(once**count for count in range(least, min(most, least + MAX_WAYS) + 1) if count < MAX_WAYS)
            if most is _constants.MAXREPEAT or most >= MAX_WAYS:
                inner = MAX_WAYS + 1
        elif kind is _constants.BRANCH:
            inner = sum(map(_ways, value[1]))
        elif kind in _ASSERTIONS:
            inner = _ways(value[1])
        elif kind is _constants.SUBPATTERN:
            inner = _ways(value[-1])
        elif kind is _constants.ATOMIC_GROUP:
            inner = _ways(value)
        elif kind is _constants.GROUPREF_EXISTS:
            inner = sum(_ways(branch) for branch in value[1:] if branch is not None)
        ways = min(ways * inner, MAX_WAYS + 1)
    return ways


@dataclass
class _State:
    """State of an automaton.

    Attributes:
        test: pattern that the next character or the position must match; None for a state without a condition.
        takes: number of characters that the test consumes, 1 or 0.
        next: indices of the states that follow.
    """

    test: re.Pattern | None = None
    takes: int = 0
    next: list[int] = field(default_factory=list)


class _Builder:
    def __init__(self, state: _parser.State, pattern: str) -> None:
        self._parser_state = state
        self._pattern = pattern
        self._tests: dict[tuple, re.Pattern] = {}
        self.states: list[_State] = []
        self.accept = self._add(_State())

    def _add(self, state: _State) -> int:
        if len(self.states) == MAX_STATES:
            raise ValueError(
                f"stop_regex={self._pattern!r} is too large: with its repetitions written out it has over {MAX_STATES} "
                "parts. Use fewer or smaller repetitions."
            )
        self.states.append(state)
        return len(self.states) - 1

    def sequence(self, tree: _parser.SubPattern, flags: int, end: int) -> int:
        """Add the states of a pattern that is followed by state `end`; return its first state."""
        for node in reversed(list(tree)):
            end = self._node(node, flags, end)
        return end

    def _node(self, node: tuple, flags: int, end: int) -> int:
        kind, value = node
        if kind in _CHARACTERS or kind is _constants.AT:
            key = (repr(node), flags)
            if key not in self._tests:
                self._tests[key] = _compiler.compile(_parser.SubPattern(self._parser_state, [node]), flags)
            return self._add(_State(self._tests[key], int(kind is not _constants.AT), [end]))
        if kind is _constants.SUBPATTERN:
            _, added, removed, body = value
            return self.sequence(body, (flags | added) & ~removed, end)
        if kind is _constants.BRANCH:
            branches = [self.sequence(branch, flags, end) for branch in value[1]]
            return self._add(_State(next=branches))
        if kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            least, most, body = value
            if most is _constants.MAXREPEAT:
                loop = self._add(_State(next=[end]))
                self.states[loop].next.append(self.sequence(body, flags, loop))
                end = loop
            else:
                after = end
                for _ in range(most - least):
                    end = self._add(_State(next=[after, self.sequence(body, flags, end)]))
            for _ in range(least):
                before = self.sequence(body, flags, end)
                if before == end:
                    break
                end = before
            return end
        raise ValueError(
            f"stop_regex={self._pattern!r} may take too long to search for, as it combines {str(kind).lower()} with "
            "large repetitions: use one of them only."
        )


@dataclass(frozen=True)
class Automaton:
    """Nondeterministic automaton that searches like `re.search`. State 0 is the end of a match."""

    states: list[_State]
    start: int

    def closure(self, states: set[int], text: str, position: int) -> set[int]:
        """Return all states that can be reached at a position without consuming a character."""
        found, todo = set(), list(states)
        while todo:
            number = todo.pop()
            if number in found:
                continue
            found.add(number)
            state = self.states[number]
            if not state.takes and (state.test is None or state.test.match(text, position)):
                todo += state.next
        return found

    def step(self, states: set[int], text: str, position: int) -> set[int]:
        """Return the states after the character at a position. A match may begin at any position."""
        after, is_match = {self.start}, {}
        for number in states:
            state = self.states[number]
            if not state.takes:
                continue
            if state.test not in is_match:
                is_match[state.test] = state.test.match(text, position)
            if is_match[state.test]:
                after.update(state.next)
        return after


class Search:
    """Search for one pattern in a growing answer. Each call continues where the last one ended."""

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._read, self._states = "", {automaton.start}

    def __call__(self, text: str) -> bool:
        """Return True if the pattern matches anywhere in the answer so far."""
        if not text.startswith(self._read):
            self._read, self._states = "", {self._automaton.start}
        # A replacement character is an incomplete character, which later tokens may complete.
        states, keep_at = self._states, len(text.rstrip("\ufffd")) - _LOOKAHEAD
        for position in range(len(self._read), len(text) + 1):
            if position == keep_at:
                self._read, self._states = text[:position], states
            reached = self._automaton.closure(states, text, position)
            if 0 in reached:
                return True
            if position < len(text):
                states = self._automaton.step(reached, text, position)
        return False


# Searches by pattern, for requests with patterns that `re` does not search for.
_searches: weakref.WeakKeyDictionary[Req, dict[str, Search]] = weakref.WeakKeyDictionary()


def check_str_based_finish(original, req: Req, new_accepted_len: int = 1) -> bool:
    """AROUND `Req._check_str_based_finish`: return True if a stop string or a `stop_regex` ends a request."""
    params = req.sampling_params
    patterns = params.stop_regex_strs
    if not patterns or not serves_dflash() or not any(map(automaton, patterns)):
        return original(req, new_accepted_len)
    params.stop_regex_strs = []
    try:
        if original(req, new_accepted_len):
            return True
    finally:
        params.stop_regex_strs = patterns
    searches = _searches.setdefault(req, {})
    tail_len = req._stop_match_tail_len(new_accepted_len)
    start = len(req.output_ids) - tail_len
    lengths = range(max(1, tail_len - new_accepted_len + 1), tail_len + 1)
    texts = [req.tokenizer.decode(req.output_ids[start : start + length]) for length in lengths]
    for pattern in patterns:
        found = automaton(pattern)
        if found is not None and pattern not in searches:
            searches[pattern] = Search(found)
        for length, text in zip(lengths, texts, strict=True):
            if re.search(pattern, text) if found is None else searches[pattern](text):
                req.finished_reason = FINISHED_MATCHED_REGEX(matched=pattern)
                req.finished_len = start + length
                return True
    return False
