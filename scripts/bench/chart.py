"""Chart of a sweep: figures against concurrency, prompt length and arrival rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bench.prompts import Prompts
from bench.results import METRICS, Results, Spread, short
from bench.workload import MODES, drafting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3
# Fields that identify a line within a panel.
_LINE = ("mode", "drafter", "block_size", "draft_window", "nodes", "adaptive")


@dataclass(frozen=True)
class Panel:
    """A chart in which one quantity varies.

    Attributes:
        title, x_label: texts of the chart.
        lines: figures by position on the axis, by the values of `_LINE`.
    """

    title: str
    x_label: str
    lines: dict[tuple, dict[float, Spread]] = field(default_factory=dict)


def metric_of(results: Results) -> str:
    """Return the metric to draw: cycle time of a decoding batch, which does not depend on acceptance, or tokens/s."""
    return "cycle_ms" if results.setup["measure"] == "decode" else "tokens_per_s"


def panels(results: Results) -> list[Panel]:
    """Return a panel for concurrency, prompt length and arrival rate each, if more than one value was measured.

    Figures for a single value of each are shown in a panel for concurrency.
    """
    metric = metric_of(results)
    found: dict[tuple[str, str], Panel] = {}
    for runs in results.repeats().values():
        run = runs[0]
        line = tuple(run[name] for name in _LINE)
        for title, x_label, x in _positions(run):
            panel = found.setdefault((title, x_label), Panel(title, x_label))
            panel.lines.setdefault(line, {})[x] = Spread.of(r[metric] for r in runs)
    grown = [panel for panel in found.values() if any(len(line) > 1 for line in panel.lines.values())]
    return grown or [panel for panel in found.values() if panel.x_label == "concurrency"]


def _positions(run: dict) -> Iterator[tuple[str, str, float]]:
    """Yield the panels that a figure may be shown in: title, axis, and position on it."""
    place = f"{short(run['target'])}, {run['backend']}, tp {run['tp']}"
    sampled = f", temperature {run['temperature']:g}" if run["temperature"] else ""
    how = sampled if run["request_rate"] is None else f"{sampled}, {run['request_rate']:g} arrivals/s"
    yield f"{place}, {run['prompts']}{how}", "concurrency", run["concurrency"]
    prompts = Prompts.parse(run["prompts"])
    if prompts.tokens is not None:
        dataset = "" if prompts.dataset is None else f", {prompts.dataset}"
        yield f"{place}{dataset}, concurrency {run['concurrency']}{how}", "prompt tokens", prompts.tokens
    if run["request_rate"] is not None:
        yield f"{place}, {run['prompts']}, concurrency {run['concurrency']}{sampled}", "arrivals/s", run["request_rate"]


def draw(results: Results, path: Path) -> None:
    """Write the PNG. Error bars span the repeats."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = panels(results)
    columns = min(_COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5 * columns, 3.8 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(shown) :]:
        axis.remove()
    for axis, panel in zip(axes.flat, shown, strict=False):
        _draw_panel(axis, panel, METRICS[metric_of(results)][0])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_panel(axis: Axes, panel: Panel, y_label: str) -> None:
    drafters = {drafter for mode, drafter, *_ in panel.lines if mode != "none"}
    for line in sorted(panel.lines, key=_order):
        mode, drafter, *how = line
        label = mode if len(drafters) < 2 else f"{mode} {short(drafter)}"
        xs, spreads = zip(*sorted(panel.lines[line].items()), strict=True)
        axis.errorbar(
            xs,
            [spread.median for spread in spreads],
            yerr=[[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]],
            label=label + drafting(*how),
            marker="o",
            capsize=3,
        )
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}" if x < 1024 else f"{x / 1024:g}k")
    axis.set_ylim(bottom=0)
    axis.set(title=panel.title, xlabel=panel.x_label, ylabel=y_label)
    axis.title.set_size("small")
    axis.grid(alpha=0.3)
    axis.legend()


def _order(line: tuple) -> tuple:
    mode, drafter, *how = line
    return MODES.index(mode), str(drafter), *(number or 0 for number in how)
