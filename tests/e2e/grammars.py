"""One grammar of every kind that a request may have, and the required form of its answers."""

import json
import re

import jsonschema

FUNCTIONS = r"(def [a-z]{1,8}\(\):\n    return [a-z]{1,8}\n){2}"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"enum": [1, 20, 300]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
SUM = r"x = [a-z]+( \+ [a-z]+)?;"
# The target often writes this trigger by itself. In angle brackets it would name a special token for llguidance.
STRUCTURAL_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "return ", "schema": {"enum": [1, 20, 300]}, "end": ";"}],
    "triggers": ["return "],
}
TAGGED = ("1;", "20;", "300;")

GRAMMARS = {
    "regex": {"regex": FUNCTIONS},
    "json_schema": {"json_schema": json.dumps(SCHEMA)},
    "ebnf": {"ebnf": 'root ::= "x = " sum ";"\nsum ::= name | name " + " name\nname ::= [a-z]+'},
    "structural_tag": {"structural_tag": json.dumps(STRUCTURAL_TAG)},
}


def assert_valid(name: str, answers: list[dict]) -> None:
    """Check that answers follow `GRAMMARS[name]`, and that at least one reaches its end."""
    if name == "structural_tag":
        tagged = [text for answer in answers for text in answer["text"].split("return ")[1:]]
        assert tagged
        assert all(any(value.startswith(text[: len(value)]) for value in TAGGED) for text in tagged)
        return
    ended = [answer["text"] for answer in answers if answer["meta_info"]["finish_reason"]["type"] == "stop"]
    assert ended
    for text in ended:
        if name == "json_schema":
            jsonschema.validate(json.loads(text), SCHEMA)
        else:
            assert re.fullmatch({"regex": FUNCTIONS, "ebnf": SUM}[name], text)
