"""Tables of an evaluation in Markdown: what candidates, noise, copies and parts of the drafter give."""

from training.cycles import DraftKind

Figure = tuple[float, float]


def tables(results: dict[str, dict[str, dict]]) -> str:
    """Return the tables of an evaluation.

    Args:
        results: by kind of prompts and by sampling. Each has tokens per cycle "of_kinds" and "gains", by the names of
            ways to draft (`cycles.draft_kinds`). A comparison with another drafter has these under its name, and the
            ratios under "over_<name>".
    """
    rows = [(kind, name, result) for kind, of_kind in results.items() for name, result in of_kind.items()]
    parts = [
        "Tokens per cycle, and ratios of them. Standard errors over prompts are in brackets. Ratios are of the same",
        "texts. Chains have no copies.\n",
        "Chains. Before: the best tokens. Now: 16 candidates with noise.\n",
        table(
            ["prompts", "sampling", "before", "16, no noise", "now", "now / before", "noise gives"],
            [[kind, name, *chain_columns(result)] for kind, name, result in rows],
        ),
    ]
    sizes = sorted({int(name.split()[2].strip(",")) for name in rows[0][2]["of_kinds"] if name.startswith("tree of ")})
    for size in sizes:
        header = ["prompts", "sampling", "before", "16, no noise", "8, noise", "now", "now / before", "noise at 8"]
        parts += [
            f"Trees of {size}. Before: 8 candidates without noise. Now: 16 candidates with noise.\n",
            table(
                [*header, "noise at 16", "16 over 8", "no copies", "copies give"],
                [[kind, name, *tree_columns(result, size)] for kind, name, result in rows],
            ),
        ]
    others = [name.removeprefix("over_") for name in rows[0][2] if name.startswith("over_")]
    for other in others:
        kinds = [DraftKind(None, 1, True), *(DraftKind(size, 16, True) for size in (None, *sizes))]
        parts += [
            f"The drafter over the {other}. Each cell: {other}, drafter, ratio.\n",
            table(
                ["prompts", "sampling", *(kind.name for kind in kinds)],
                [[kind, name, *(comparison(result, other, way.name) for way in kinds)] for kind, name, result in rows],
            ),
        ]
    return "\n".join(parts)


def chain_columns(result: dict) -> list[str]:
    """Return the cells of chains."""
    best, plain, now = DraftKind(None, 1, True), DraftKind(None, 16, False), DraftKind(None, 16, True)
    of_kinds, gains = result["of_kinds"], result["gains"]
    return [
        cell(of_kinds.get(best.name)),
        cell(of_kinds.get(plain.name)),
        cell(of_kinds.get(now.name)),
        cell(gains.get(f"{now.name}, over one of the best tokens")),
        cell(gains.get(f"{now.name}, over one without noise")),
    ]


def tree_columns(result: dict, size: int) -> list[str]:
    """Return the cells of trees of a size. Greedy texts have no noise, so "before" is 8 candidates there."""
    now, less = DraftKind(size, 16, True), DraftKind(size, 8, True)
    plain, before = DraftKind(size, 16, False), DraftKind(size, 8, False)
    without = DraftKind(size, 16, True, has_copies=False)
    of_kinds, gains = result["of_kinds"], result["gains"]
    is_sampled = before.name in of_kinds
    return [
        cell(of_kinds.get(before.name if is_sampled else less.name)),
        cell(of_kinds.get(plain.name)),
        cell(of_kinds.get(less.name) if is_sampled else None),
        cell(of_kinds.get(now.name)),
        cell(gains.get(f"{now.name}, over one of 8 without noise" if is_sampled else f"{now.name}, over one of 8")),
        cell(gains.get(f"{less.name}, over one without noise")),
        cell(gains.get(f"{now.name}, over one without noise")),
        cell(gains.get(f"{now.name}, over one of 8")),
        cell(of_kinds.get(without.name)),
        cell(gains.get(f"{now.name}, over one without copies")),
    ]


def comparison(result: dict, other: str, way: str) -> str:
    """Return the cell that compares the drafter with another one."""
    figures = (result[other]["of_kinds"][way], result["of_kinds"][way], result[f"over_{other}"][way])
    return ", ".join(cell(figure) for figure in figures)


def cell(figure: Figure | None) -> str:
    """Return a figure with its standard error; nothing if it was not measured."""
    return "" if figure is None else f"{figure[0]:.3f} ({figure[1]:.3f})"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown, with a final newline."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
