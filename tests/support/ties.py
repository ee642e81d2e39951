"""Greedy answers in bf16: the text with DFLASH is the text without, up to a tie of the target's two best tokens."""

from __future__ import annotations

# Of two logits of a random target in bf16, that reach 16, where neighbouring numbers are 0.125 apart; another expert
# adds its share.
TIE, TIE_OF_EXPERTS = 0.25, 0.5


def first_difference(want: dict, got: dict) -> int | None:
    """Where the `output_ids` of two answers part; None: nowhere."""
    pairs = zip(want["output_ids"], got["output_ids"])
    return next((i for i, (expected, mine) in enumerate(pairs) if mine != expected), None)


def describe_difference(want: dict, got: dict) -> str:
    """Where two answers of an Engine part, and how far apart the two best tokens are there; `want` has them."""
    differs = first_difference(want, got)
    best, second = (entry[:2] for entry in want["meta_info"]["output_top_logprobs"][differs][:2])
    tokens = f"{got['output_ids'][differs]} for {want['output_ids'][differs]}"
    return f"differs at {differs}: {tokens}; best are {best[1]} and {second[1]}, {best[0] - second[0]:.4f} nats apart"


def count_identical(plain: list[dict], dflash: list[dict], tie: float) -> int:
    """Answers that are equal; every other one must part where the best token leads by no more than `tie`.

    Args:
        plain: answers without speculation: `output_ids`, and `top2`, the log probabilities of the two best tokens at
            every position.
        dflash: answers with DFLASH to the same requests: `output_ids`.
    """
    identical = 0
    for want, got in zip(plain, dflash):
        assert len(got["output_ids"]) == len(want["output_ids"])
        differs = first_difference(want, got)
        if differs is None:
            identical += 1
            continue
        best, second = want["top2"][differs]
        assert best - second <= tie, f"differs at {differs}, where the best token leads by {best - second}"
    return identical
