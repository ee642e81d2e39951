"""Constants that were tuned, in one place, with what each one is for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Settings:
    """
    Attributes:
        sampler_bytes: of float32 logits that SGLang's sampler gets at a time, whole requests of them and at least one:
            so large that a GPU takes about as long for them as the host does to launch it.
        sampler_copies: how many times as much the sampler holds at its most, of requests without seeds.
        seeded_sampler_copies: the same with seeds, for which it sorts, and computes in float64.
        tree_devices: where trees are verified unless chains are asked for, as they cost nothing there.
        busy: where a cycle of all rows takes so many times as long as one of few, there are graphs for the numbers
            between; elsewhere a GPU waits for weights, however many rows there are.
        timed_replays: of each graph when the server starts; the fastest counts.
        explore_every: cycles with more rows than are best, to see what those have become, take one of so many parts of
            the time.
        paces: the last so many cycles that were looked at tell how long the host takes for one.
        newest: what the last cycle of a kind counts in the time that cycles of that kind are taken to need.
        decay: what is left of a count of accepted drafts after another cycle: acceptance is that of the last hundred.
        learned_every: cycles of one number of rows whose results are learned from at once, that a choice is for, and
            of which one is measured, where a GPU may be waiting for the host.
        tried_at_once: where a cycle tries more drafts than this, it counts as several.
        doubt: how many times the seconds that were measured on a CPU more rows than one are taken to need.
        fading: what is left of the seconds that a width is taken to need after a cycle of another width.
        timed_every: cycles between two whose stages are timed, with `--enable-metrics`.
        context_tokens: that are appended to the drafter's context at a time: bounds the memory of a long prompt.
        slots_ahead: KV slots that are reserved for a request beyond what a cycle may need, so that not every cycle of a
            batch reserves some.
    """

    sampler_bytes: int = 64 << 20
    sampler_copies: int = 7
    seeded_sampler_copies: int = 16
    tree_devices: tuple[str, ...] = ("cuda",)
    busy: float = 1.05
    timed_replays: int = 3
    explore_every: int = 64
    paces: int = 8
    newest: float = 0.2
    decay: float = 0.99
    learned_every: int = 16
    tried_at_once: int = 10
    doubt: float = 1.05
    fading: float = 0.9995
    timed_every: int = 8
    context_tokens: int = 4096
    slots_ahead: int = 64


SETTINGS = Settings()
