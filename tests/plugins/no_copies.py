"""Benchmark plugin: trees copy nothing from the request's own text, to measure what copies give.

`support.plugins` installs it. A server keeps the texts, as with copies.
"""


def register() -> None:
    from sglang_dflash.draft.texts import Copies

    Copies.place = classmethod(lambda cls, texts, block, candidates, logits: cls(None, None))
