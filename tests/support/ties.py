"""Greedy answers in bf16: the text with DFLASH equals the text without, up to a tie of the target's best two tokens."""

from __future__ import annotations

from dataclasses import dataclass

# Difference of two logits of a random target in bf16. Logits reach 16, where neighbouring numbers are 0.125 apart.
# Another choice of expert adds to it.
TIE, TIE_OF_EXPERTS = 0.25, 0.5
# Share of answers by which the number of identical ones may be smaller than usual. With the same kernels it is the same
# each time. Other kernels round otherwise.
MARGIN = 0.1


@dataclass(frozen=True)
class Comparison:
    """Answers with DFLASH, compared with those without.

    Attributes:
        identical: equal answers.
        total: all answers.
        agreed: share of the tokens that come before the first difference of their answer.
        partings: of the others: the lead of the target's best token, in nats, where the answers differ, and a
            description.
    """

    identical: int
    total: int
    agreed: float
    partings: tuple[tuple[float, str], ...]

    def __str__(self) -> str:
        widest = max((lead for lead, _ in self.partings), default=0.0)
        return f"{self.identical} of {self.total} identical, {self.agreed:.1%} of tokens agree, ties up to {widest:.3f}"

    def assert_ties(self, tie: float) -> None:
        """Check that no answer differs where the best token leads by more than `tie` nats."""
        wide = [what for lead, what in self.partings if lead > tie]
        assert not wide, "\n".join(wide)

    def assert_floor(self, usual: int) -> None:
        """Check that about as many answers are identical as usual.

        Errors that change few tokens pass `assert_ties`, because most texts of bf16 come to a tie anyway.
        """
        assert self.identical >= self.floor(usual), f"{self}; usually {usual} are"

    def assert_agreed(self, share: float) -> None:
        """Check the share of tokens that agree, for random targets, of whose texts few are identical."""
        assert self.agreed >= share, f"{self}; usually over {share:.0%} of tokens do"

    def floor(self, usual: int) -> int:
        return usual - max(1, round(MARGIN * self.total))


def compare(plain: list[dict], dflash: list[dict]) -> Comparison:
    """Compare answers of an Engine with those to the same requests without speculation.

    Args:
        plain: with `top_logprobs_num` of 2 or more. They may go on after the others end.
        dflash: of any lengths. Those that differ may be longer.
    """
    identical, agreed, partings = 0, 0, []
    for i, (want, got) in enumerate(zip(plain, dflash, strict=True)):
        differs = first_difference(want, got)
        agreed += len(got["output_ids"]) if differs is None else differs
        if differs is None:
            assert len(got["output_ids"]) <= len(want["output_ids"]), f"answer {i} is longer"
            identical += 1
        else:
            partings.append((lead(want, differs), f"answer {i} {describe_difference(want, got)}"))
    return Comparison(identical, len(plain), agreed / sum(len(got["output_ids"]) for got in dflash), tuple(partings))


def first_difference(want: dict, got: dict) -> int | None:
    """Return the index at which the `output_ids` of two answers first differ; None if they are equal."""
    pairs = zip(want["output_ids"], got["output_ids"])
    return next((i for i, (expected, mine) in enumerate(pairs) if mine != expected), None)


def lead(want: dict, index: int) -> float:
    """Return the lead of the best token over the second one, in nats, at an index of an answer."""
    best, second = (entry[0] for entry in want["meta_info"]["output_top_logprobs"][index][:2])
    return best - second


def describe_difference(want: dict, got: dict) -> str:
    """Describe where two answers of an Engine differ, and the gap between the best two tokens there, as in `want`."""
    differs = first_difference(want, got)
    best, second = (entry[:2] for entry in want["meta_info"]["output_top_logprobs"][differs][:2])
    tokens = f"{got['output_ids'][differs]} for {want['output_ids'][differs]}"
    return f"differs at {differs}: {tokens}; best are {best[1]} and {second[1]}, {best[0] - second[0]:.4f} nats apart"


def tokens_per_cycle(answers: list[dict]) -> float:
    """Return the tokens of a decode cycle, on average. The first token of an answer comes from the prefill."""
    cycles = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    return sum(len(answer["output_ids"]) - 1 for answer in answers) / cycles
