"""How many rows of a block are verified: the choice of most tokens per time."""

import math
import random

import pytest

from sglang_dflash.engine.adaptive_width import VerifyWidth, verify_widths

WIDTHS = (4, 8, 12, 16)


def run(width: VerifyWidth, acceptance: float, cycles: int, bs: int = 8) -> list[int]:
    """Serve cycles whose drafts are accepted with a probability each, two in flight as in overlap scheduling; the
    widths that were chosen."""
    draw = random.Random(0)
    chosen = [width.choose(bs)]
    for _ in range(cycles - 1):
        chosen.append(width.choose(bs))
        rows = chosen[-2]
        correct = [next((n for n in range(rows - 1) if draw.random() > acceptance), rows - 1) for _ in range(bs)]
        assert width.complete(correct) == rows
    return chosen


def test_widths():
    assert verify_widths(16) == WIDTHS
    assert verify_widths(10) == (3, 5, 8, 10)
    assert verify_widths(2) == (2,)


@pytest.mark.parametrize(
    ("acceptance", "fixed_cost", "best"),
    # Tokens per cycle: (1 - a^W) / (1 - a).
    [(0.3, 1, 4), (0.8, 1, 4), (0.8, 20, 8), (0.85, 20, 12), (0.95, 100, 16), (0.0, 1000, 4)],
)
def test_most_tokens_per_time(acceptance, fixed_cost, best):
    width = VerifyWidth(WIDTHS, lambda bs, rows: fixed_cost + rows)
    per_time = {w: (1 - acceptance**w) / (1 - acceptance) / (fixed_cost + w) for w in WIDTHS}
    assert max(per_time, key=per_time.get) == best

    chosen = run(width, acceptance, 1000)[500:]

    # Whole blocks are verified now and then, to learn what the last rows would give.
    assert sum(w == best for w in chosen) > 0.9 * len(chosen)
    assert chosen.count(16) >= len(chosen) // 100


def test_long_contexts_make_rows_cheap():
    """What a cycle takes whatever its width is spread over its tokens."""
    width = VerifyWidth(WIDTHS, lambda bs, rows: rows)
    width.choose(8)
    width._tried, width._accepted = [10.0] * 15, [8.0] * 15
    assert [width.choose(8, more) for more in (0, 20, 400)] == [4, 8, 16]


def test_free_rows_are_all_verified():
    assert set(run(VerifyWidth(WIDTHS, lambda bs, rows: 1.0), 0.5, 300)) == {16}


def test_another_text_is_learned():
    """The rows that are seldom verified are seen to be worth it again."""
    width = VerifyWidth(WIDTHS, lambda bs, rows: 10 + rows)
    assert run(width, 0.2, 500)[-1] == 4
    # The last of those cycles has not been completed.
    width.complete([0] * 8)
    assert run(width, 0.97, 2000)[-1] == 16


def test_what_has_no_graph_is_not_chosen():
    def cost(bs: int, rows: int) -> float:
        return 1.0 if rows == 16 else math.inf

    assert set(run(VerifyWidth(WIDTHS, cost), 0.1, 300)) == {16}


def test_one_width():
    width = VerifyWidth((16,), lambda bs, rows: math.nan)
    assert run(width, 0.5, 10) == [16] * 10
