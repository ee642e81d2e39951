"""Greedy answers in bf16: the text with DFLASH equals the text without, up to a tie of the target's best two tokens."""

from __future__ import annotations

# Difference of two logits of a random target in bf16. Logits reach 16, where neighbouring numbers are 0.125 apart.
# Another choice of expert adds to it.
TIE, TIE_OF_EXPERTS = 0.25, 0.5


def first_difference(want: dict, got: dict) -> int | None:
    """Return the index at which the `output_ids` of two answers first differ; None if they are equal."""
    pairs = zip(want["output_ids"], got["output_ids"])
    return next((i for i, (expected, mine) in enumerate(pairs) if mine != expected), None)


def describe_difference(want: dict, got: dict) -> str:
    """Describe where two answers of an Engine differ, and the gap between the best two tokens there, as in `want`."""
    differs = first_difference(want, got)
    best, second = (entry[:2] for entry in want["meta_info"]["output_top_logprobs"][differs][:2])
    tokens = f"{got['output_ids'][differs]} for {want['output_ids'][differs]}"
    return f"differs at {differs}: {tokens}; best are {best[1]} and {second[1]}, {best[0] - second[0]:.4f} nats apart"


def count_identical(plain: list[dict], dflash: list[dict], tie: float) -> int:
    """Count equal answers. Other answers must differ where the best token leads by at most `tie`.

    Args:
        plain: answers without speculation, with `output_ids` and `top2`: the log probabilities of the best two tokens
            at every position.
        dflash: answers with DFLASH to the same requests, with `output_ids`.
        tie: in nats.
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
