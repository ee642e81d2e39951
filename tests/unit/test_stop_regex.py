"""`stop_regex`: the automaton finds what `re` finds, in growing answers, and never takes long."""

import random
import re

import pytest

from sglang_dflash.requests.stop_regex import Search, automaton, check_stop_regex

# Patterns with so many possible matches that `re` must not search them.
PATTERNS = [
    r"a+b",
    r"(a+)+b",
    r"(a|b)*c$",
    r"\s+END\b",
    r"(?i:abc)+x",
    r"[^x]*xy",
    r"(a?){7}a{2}b",
    r"^b+$",
    r"(?m)^a+$",
    r"\d{1,3}\.\d{1,300}",
    r"(ab|a)(bc|c)+$",
    r"a*",
    r".*\n\n",
    r"(?s).*b.*c",
    r"\bab+\b",
    r"(a*)*$",
    r"a+\Z",
    r"\B(a|b)+\b ",
    r"(?:a{0,5}){0,5}c",
    r"é+…",
]
# Patterns with few possible matches.
LIGHT = [r"END", r"\n\n", r"</?answer>", r"\d{1,3}\.\d{1,3}", r"(?<=\n)END", r"(?>ab|a)c", r"(a|b)\1", r"", r"\ud800"]
PIECES = [*"aabbc \nxyA.1é…", "END", "abcx", "1.1", "\n\n", "é…"]
REFUSED = {
    r"(a+)\1+b": "groupref",
    r"(?=a+)a+b": "assert",
    r"(?>a+)b": "atomic_group",
    r"a++b": "possessive_repeat",
    r"a{1,99999}b": "too large",
    r"((a{1,100}){1,100}){1,100}": "too large",
    r"a{1,99999999999}": "repetition number is too large",
    "(" * 5000 + "a" + ")" * 5000: "longer than 256 bytes",
    r"(": "unterminated",
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_search_finds_what_re_finds(pattern):
    check_stop_regex(pattern)
    chance = random.Random(pattern)
    found = 0
    for _ in range(200):
        text = "".join(chance.choice(PIECES) for _ in range(chance.randrange(9)))
        search = Search(automaton(pattern))
        end = 0
        while True:
            expected = re.search(pattern, text[:end]) is not None
            assert search(text[:end]) == expected, (text, end)
            found += expected
            if expected or end == len(text):
                break
            end = min(end + chance.randrange(1, 4), len(text))
    assert found


def test_search_reads_anew_what_has_changed():
    search = Search(automaton(r"(b+)+x"))
    # The bytes of a character arrived in several tokens.
    assert not search("bbbb\ufffd\ufffd")
    assert not search("bbbb…")
    assert not search("aaaa")
    assert search("aaaabx")


@pytest.mark.parametrize("pattern", LIGHT)
def test_few_ways_are_left_to_re(pattern):
    check_stop_regex(pattern)
    assert automaton(pattern) is None


@pytest.mark.parametrize("pattern", REFUSED)
def test_refused(pattern):
    with pytest.raises(ValueError, match=r"^stop_regex=") as caught:
        check_stop_regex(pattern)
    assert REFUSED[pattern] in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("pattern", [r"(a+)+b", r"(a|a)*b", r"(.*)*x", r"(a?){25}a{25}b", r"(){999999999}b"])
def test_catastrophic_patterns_end(pattern):
    """`re` would take years or run out of memory."""
    check_stop_regex(pattern)
    search = Search(automaton(pattern))
    for length in range(0, 2000, 20):
        assert not search("a" * length)
