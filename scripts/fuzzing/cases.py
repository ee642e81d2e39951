"""Cases: the flags of two servers, and the rounds of requests that both get."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving import RETRACT, SYNC, Settings

from models import hybrid, tiny

# Only targets with recurrent layers read it. All servers get it, as servers with the same environment are forked from
# the same process.
_ENV = (("SGLANG_MAMBA_CONV_DTYPE", "float32"),)
_REQUEST_FLAGS = (("enable-custom-logit-processor", True), ("enable-return-hidden-states", True))
# Flags that only watch, each drawn by itself.
_OBSERVABILITY: list[tuple[tuple[str, Any], ...]] = [
    (("enable-metrics", True),),
    (("enable-metrics", True), ("enable-mfu-metrics", True)),
    (("enable-cache-report", True),),
    (("enable-request-time-stats-logging", True),),
    (("log-requests", True), ("log-requests-level", 3)),
    (("decode-log-interval", 1),),
    (("show-time-cost", True),),
    (("enable-metrics", True), ("export-metrics-to-file", True), ("export-metrics-to-file-dir", "/tmp/fuzz-metrics")),
]
_LIMITS = {"max-total-tokens": 20000, "max-running-requests": 16}


@dataclass(frozen=True)
class Pair:
    """A target and its drafter."""

    target: Path
    drafter: Path
    prompts: list[str]
    is_recurrent: bool

    @property
    def vocab_size(self) -> int:
        config = json.loads((self.target / "config.json").read_text())
        return config.get("text_config", config)["vocab_size"]


PAIRS = {
    "tiny": Pair(tiny.TARGET_DIR, tiny.DRAFTER_DIR, tiny.load_prompts(), False),
    "hybrid": Pair(hybrid.TARGET_DIR, hybrid.DRAFTER_DIR, tiny.load_prompts(), True),
}


@dataclass
class Case:
    """Flags and requests that one seed stands for.

    Attributes:
        seed: int. Everything in the case is drawn from it.
        pair: name in `PAIRS`.
        shared_flags: flags and values for both servers. They may change an answer.
        layout_flags: flags and values for the server with DFLASH. They must not change an answer.
        env: environment variables of the server with DFLASH.
        rounds: lists of requests. The requests of a round are sent at the same time. `fuzzing.mixes` has their fields.
    """

    seed: int
    pair: str
    shared_flags: list[tuple[str, Any]]
    layout_flags: list[tuple[str, Any]]
    env: list[tuple[str, str]] = field(default_factory=list)
    rounds: list[list[dict]] = field(default_factory=list)

    @property
    def flags(self) -> dict[str, Any]:
        return dict(self.shared_flags) | dict(self.layout_flags)

    @property
    def is_seeded(self) -> bool:
        """True if the seeds of requests decide what is sampled."""
        return "enable-deterministic-inference" in self.flags

    @property
    def pool_tokens(self) -> int:
        return self.flags.get("max-total-tokens", _LIMITS["max-total-tokens"])

    @property
    def rows(self) -> int:
        """Most tokens of a request that one cycle verifies."""
        return self.flags.get("speculative-num-draft-tokens", 16)

    def settings(self) -> Settings:
        """Return the settings of the server with DFLASH.

        The server without speculation has a plain layout. It runs without overlap scheduling, with which SGLang applies
        penalties one token late.
        """
        pair = PAIRS[self.pair]
        shared = (*_REQUEST_FLAGS, ("model-path", str(pair.target)), *map(_pair, self.shared_flags))
        if pair.is_recurrent:
            shared += (("max-mamba-cache-size", 100),)
        drafter = (("speculative-draft-model-path", str(pair.drafter)),)
        plain = Settings(f"plain-{self.pair}", flags=shared, plain_flags=(SYNC,), env=_ENV)
        return Settings(
            f"fuzz-{self.seed}",
            flags=shared,
            dflash_flags=(*drafter, *map(_pair, self.layout_flags)),
            env=(*_ENV, *map(_pair, self.env)),
            plain=plain,
        )

    def dump(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.__dict__, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Case:
        return cls(**json.loads(path.read_text()))


def _pair(flag: list | tuple) -> tuple:
    """Return a flag and its value as a tuple. JSON has a list."""
    return tuple(flag)


def draw_flags(seed: int, chance: random.Random) -> Case:
    """Draw a case without requests."""
    pair = "hybrid" if chance.random() < 0.25 else "tiny"
    is_recurrent = PAIRS[pair].is_recurrent
    shared: dict[str, Any] = {}
    if chance.random() < 0.5:
        shared["enable-priority-scheduling"] = True
    if chance.random() < 0.2:
        shared["grammar-backend"] = "llguidance"
    has_trees = not is_recurrent and chance.random() < 0.5
    if not has_trees and chance.random() < 0.4:
        shared["enable-deterministic-inference"] = True
    layout = _draw_speculation(chance, has_trees) | _draw_schedule(chance, is_recurrent)
    if "enable-priority-scheduling" in shared:
        layout["schedule-policy"] = chance.choice(["fcfs", "lof"])
        layout["retraction-policy"] = chance.choice(["length", "priority"])
    env: list[tuple[str, str]] = []
    if chance.random() < 0.45:
        # A pool that is too small for the requests of a round. They are admitted as if they ended at once.
        layout |= {"max-total-tokens": chance.choice([640, 960]), "schedule-conservativeness": 0.05}
        layout["max-running-requests"] = min(layout["max-running-requests"], 8)
        env += RETRACT
    if is_recurrent:
        layout |= _draw_recurrent(chance, layout)
    for flags in _OBSERVABILITY:
        if chance.random() < 0.2:
            layout |= dict(flags)
    return Case(seed, pair, list(shared.items()), list(layout.items()), env)


def _draw_speculation(chance: random.Random, has_trees: bool) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    if chance.random() < 0.5:
        flags["speculative-dflash-block-size"] = chance.choice([2, 3, 5, 7, 8, 12, 16])
    if has_trees:
        flags["speculative-eagle-topk"] = chance.choice([2, 3, 4, 8, 16])
        flags["speculative-num-draft-tokens"] = chance.choice([4, 7, 10, 16, 20, 32, 64])
    if chance.random() < 0.4:
        flags["speculative-adaptive"] = True
    if chance.random() < 0.35:
        flags["speculative-draft-window-size"] = chance.choice([1, 7, 16, 37, 64, 80, 300])
    return flags


def _draw_schedule(chance: random.Random, is_recurrent: bool) -> dict[str, Any]:
    flags: dict[str, Any] = {"max-running-requests": chance.choice([2, 4, 8, 16])}
    if chance.random() < 0.5:
        flags["disable-overlap-schedule"] = True
    if chance.random() < 0.4:
        flags["page-size"] = chance.choice([2, 4, 16, 64])
    if chance.random() < 0.6:
        flags["chunked-prefill-size"] = chance.choice([16, 32, 64, 128])
        # A chunk is at least a page.
        flags["chunked-prefill-size"] = max(flags["chunked-prefill-size"], flags.get("page-size", 1))
        # With larger pages SGLang cuts the prompts of two requests in one mixed batch, and forgets the rest of one.
        if not is_recurrent and chance.random() < 0.6 and "page-size" not in flags:
            flags["enable-mixed-chunk"] = True
    if chance.random() < 0.15:
        flags["disable-radix-cache"] = True
    else:
        flags["radix-eviction-policy"] = chance.choice(["lru", "lfu", "slru", "priority"])
    flags["schedule-policy"] = chance.choice(["fcfs", "lpm", "random", "lof"])
    if chance.random() < 0.2:
        flags["prefill-max-requests"] = chance.choice([1, 3])
    if chance.random() < 0.2:
        flags["stream-interval"] = chance.choice([2, 7])
    if chance.random() < 0.1:
        flags["num-continuous-decode-steps"] = 3
    return flags


def _draw_recurrent(chance: random.Random, layout: dict[str, Any]) -> dict[str, Any]:
    """Draw flags for a target with recurrent layers. Removes flags from `layout` that it does not support."""
    if chance.random() < 0.5:
        # It supports neither overlap scheduling nor pages.
        layout.pop("page-size", None)
        return {"mamba-radix-cache-strategy": "no_buffer", "disable-overlap-schedule": True}
    if "page-size" in layout:
        # The cache keeps states at multiples of the kernels' chunk.
        layout["page-size"] = 64
        layout["chunked-prefill-size"] = max(layout.get("chunked-prefill-size", 64), 64)
    return {"mamba-radix-cache-strategy": "extra_buffer", "mamba-track-interval": 64}
