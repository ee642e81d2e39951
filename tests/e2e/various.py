"""Requests of every kind that has its own path through a decode cycle, in one batch."""

from grammars import FUNCTIONS

KINDS = [
    {},
    {"presence_penalty": 0.6},
    {"regex": FUNCTIONS, "ignore_eos": False},
    {"return_logprob": True},
]


def various_requests(prompts: list[list[int]]) -> list[dict]:
    """Return one request per prompt, of all kinds in turn, with answers of 20 to 98 tokens."""
    return [
        {"input_ids": prompt, "max_new_tokens": 20 + 13 * (i % 7), "ignore_eos": True} | KINDS[i % len(KINDS)]
        for i, prompt in enumerate(prompts)
    ]
