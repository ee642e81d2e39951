"""Measurements of a sweep, kept in a JSON file so that it can be resumed, and shown as a table."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.workload import MODES

# Fields that identify a figure. Runs that share them are repeats.
KEY = (
    *("mode", "target", "drafter", "backend", "tp", "block_size", "draft_window", "nodes", "adaptive"),
    *("prompts", "temperature", "concurrency", "request_rate"),
)
# Fields that two modes must share to be compared.
_PLACE = ("target", "backend", "tp", "prompts", "temperature", "concurrency", "request_rate")
METRICS = {
    "requests_per_s": ("requests/s", 2),
    "tokens_per_s": ("tokens/s", 1),
    "ttft_ms": ("TTFT, ms", 1),
    "ttft_p99_ms": ("TTFT p99, ms", 1),
    "tpot_ms": ("TPOT, ms", 2),
    "itl_ms": ("ITL, ms", 2),
    "itl_p99_ms": ("ITL p99, ms", 2),
    "cycle_ms": ("ms per cycle", 2),
    "accept_length": ("accept length", 2),
    "accuracy": ("accuracy", 3),
    "start_s": ("start, s", 0),
    "graphs_gib": ("graphs of other lengths, GiB", 2),
}


@dataclass(frozen=True)
class Spread:
    """Median and range over repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = list(values)
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int) -> str:
        low, median, high = (f"{value:.{digits}f}" for value in (self.low, self.median, self.high))
        return median if low == high else f"{median} ({low} to {high})"


class Results:
    """The JSON file of a sweep.

    Attributes:
        setup: hardware, versions and settings, the same for all runs.
        commands: commands that measured the runs, with dates.
        runs: one dict of `KEY`, "repeat" and `METRICS` each.

    Raises:
        ValueError: the file is not a sweep's, or has another setup. Such figures cannot be in one table.
    """

    def __init__(self, path: Path, setup: dict) -> None:
        self._path = path
        self.setup = setup
        self.commands: list[str] = []
        self.runs: list[dict] = []
        if path.exists():
            saved = json.loads(path.read_text())
            if "figures" not in saved:
                raise ValueError(f"{path} is not a sweep's file, or is of an older version: choose another --out.")
            differing = [name for name in setup | saved["setup"] if setup.get(name) != saved["setup"].get(name)]
            if differing:
                raise ValueError(
                    f"{path} was measured with another {', '.join(differing)}; use the settings that it was begun "
                    "with, or choose another --out."
                )
            self.commands = saved["commands"]
            self.runs = [
                figure["of"] | {"repeat": repeat} | measured
                for figure in saved["figures"]
                for repeat, measured in enumerate(figure["repeats"])
            ]

    @classmethod
    def load(cls, path: Path) -> Results:
        """Return the results in a file, with any setup."""
        return cls(path, json.loads(path.read_text()).get("setup", {}))

    def has(self, key: dict) -> bool:
        return any(_part(run, KEY) == _part(key, KEY) for run in self.runs)

    def add_round(self, runs: list[dict], command: str) -> None:
        """Save all repeats of configurations that took turns. They replace earlier repeats of theirs."""
        if command not in self.commands:
            self.commands.append(command)
        keys = [_part(run, KEY) for run in runs]
        self.runs = [run for run in self.runs if _part(run, KEY) not in keys] + runs
        figures = [
            {"of": dict(zip(KEY, key, strict=True)), "repeats": [_measured(run) for run in runs]}
            for key, runs in self.repeats().items()
        ]
        saved = {"setup": self.setup, "commands": self.commands, "figures": figures}
        # A sweep may be interrupted at any time, so the file is replaced in one step.
        new = self._path.with_suffix(".json.new")
        new.write_text(json.dumps(saved) + "\n")
        os.replace(new, self._path)

    def repeats(self) -> dict[tuple, list[dict]]:
        """Return the runs by `KEY`, in the order in which they were measured."""
        by_key: dict[tuple, list[dict]] = {}
        for run in self.runs:
            by_key.setdefault(_part(run, KEY), []).append(run)
        return by_key


def _measured(run: dict) -> dict:
    # Six digits are more than the precision of any figure.
    return {name: float(f"{run[name]:.6g}") for name in METRICS if name in run}


def _part(run: dict, names: tuple[str, ...]) -> tuple:
    return tuple(run[name] for name in names)


def speedup(runs: list[dict], base: list[dict]) -> Spread:
    """Return the tokens/s of one configuration over another's, turn by turn. A disturbance of a turn affects both."""
    pairs = zip(runs, base, strict=True)
    return Spread.of(run["tokens_per_s"] / other["tokens_per_s"] for run, other in pairs)


def table(results: Results) -> list[str]:
    """Return the rows of a Markdown table, with speed-ups over no speculation and over the peers."""
    figures = results.repeats()
    compared = ["none", "in-tree", *["vllm"] * _has_vllm(results)]
    metrics = [name for name in METRICS if any(name in run for run in results.runs)]
    has_rates = any(run["request_rate"] is not None for run in results.runs)
    has_trees, has_adaptive, has_temperatures = (
        any(run[name] for run in results.runs) for name in ("nodes", "adaptive", "temperature")
    )
    titles = ["drafter", "attention", "tp", "block", "window"]
    titles += ["tree"] * has_trees + ["adaptive"] * has_adaptive + ["prompts"]
    titles += ["temperature"] * has_temperatures + ["concurrency"]
    titles += ["arrivals/s"] * has_rates + ["served by"]
    titles += [METRICS[name][0] for name in metrics] + [f"x {mode}" for mode in compared]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for runs in sorted(figures.values(), key=lambda runs: _order(runs[0])):
        run = runs[0]
        bases = {
            mode: base
            for base in figures.values()
            for mode in compared
            if base[0]["mode"] == mode != run["mode"] and _comparable(run, base[0])
        }
        cells = [short(run["drafter"]), run["backend"], run["tp"], run["block_size"] or "", run["draft_window"] or ""]
        cells += [run["nodes"] or ""] * has_trees + ["yes" if run["adaptive"] else ""] * has_adaptive
        cells += [run["prompts"]] + [f"{run['temperature']:g}"] * has_temperatures + [run["concurrency"]]
        cells += [run["request_rate"] or ""] * has_rates + [run["mode"]]
        cells += [Spread.of(r[name] for r in runs).text(METRICS[name][1]) if name in run else "" for name in metrics]
        cells += [speedup(runs, bases[mode]).text(3) if mode in bases else "" for mode in compared]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return lines


def _has_vllm(results: Results) -> bool:
    return any(run["mode"] == "vllm" for run in results.runs)


def _comparable(run: dict, base: dict) -> bool:
    """Return whether a speed-up of `run` over `base` has a meaning.

    The drafter must be the same, except for the base without speculation. The in-tree worker has only chains of whole
    blocks.
    """
    names = _PLACE if base["mode"] == "none" else (*_PLACE, "drafter", "block_size", "draft_window")
    return run["mode"] != "none" and _part(run, names) == _part(base, names)


def _order(run: dict) -> tuple:
    return (
        *(str(run[name] or "") for name in ("target", "backend")),
        run["tp"],
        # By length, not as text.
        re.sub(r"\d+", lambda number: number[0].zfill(9), run["prompts"]),
        run["temperature"],
        run["concurrency"],
        run["request_rate"] or math.inf,
        MODES.index(run["mode"]),
        str(run["drafter"]),
        run["block_size"] or 0,
        run["draft_window"] or 0,
        run["nodes"] or 0,
        run["adaptive"],
    )


def short(model: str | None) -> str:
    """Return the last two parts of a path or name."""
    return "" if model is None else "/".join(model.rstrip("/").split("/")[-2:])


def markdown(results: Results, title: str, chart: str | None) -> str:
    """Return the report: setup, commands and every figure. `chart` is a file in the same folder."""
    setup = results.setup
    # Servers with default flags take all of a GPU.
    one_by_one = (setup.get("serving") or {}).get("default_flags", False)
    lines = [
        f"# {title}",
        "",
        f"{setup['hardware']}; {setup['versions']}.",
        "",
        *(f"    {command}" for command in results.commands),
        "",
        f"{setup['method']} Figures are medians (min to max) over {setup['repeats']} repeats, in which the engines "
        f"that are compared {'run one after the other' if one_by_one else 'take turns'}. Speed-ups are in tokens/s, "
        "repeat by repeat. Which worker served is checked through "
        f"`/server_info`{', vLLM through `/version`' if _has_vllm(results) else ''}.",
        "",
    ]
    if chart:
        lines += [f"![the figures below]({chart})", ""]
    return "\n".join([*lines, *table(results)]) + "\n"
