"""A case: the flags of two servers, and the rounds of requests that both are sent."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving import RETRACT, SYNC, Settings

from models import hybrid, tiny

# Targets with recurrent layers convolve in the model's dtype. Another target does not read it, and servers of the same
# environment are forked from the same process.
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
    """What is drawn from one seed.

    Attributes:
        seed: all of the case is drawn from it.
        pair: a name of `PAIRS`.
        shared_flags: flags that change what an answer is; both servers get them.
        layout_flags: flags of the server with DFLASH that may change how a text is computed, and not the text.
        env: environment of the server with DFLASH.
        rounds: lists of requests; those of a round are sent at the same time. See `fuzzing.mixes` for their fields.
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
        """Whether answers are drawn by the seeds of their requests."""
        return "enable-deterministic-inference" in self.flags

    @property
    def pool_tokens(self) -> int:
        return self.flags.get("max-total-tokens", _LIMITS["max-total-tokens"])

    @property
    def rows(self) -> int:
        """Tokens that a cycle verifies of a request, at most."""
        return self.flags.get("speculative-num-draft-tokens", 16)

    def settings(self) -> Settings:
        """Settings of the server with DFLASH. The one without speculation has a plain layout, and no overlap
        scheduling, with which its penalties would be a token late."""
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
    """A flag and its value, which JSON has as a list."""
    return tuple(flag)


def draw_flags(seed: int, chance: random.Random) -> Case:
    """A case without requests."""
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
        # Too small for the requests of a round, with which it is filled as if they ended at once.
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
        if not is_recurrent and chance.random() < 0.6:
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
    """Flags of a target with recurrent layers, in place of some that it does not take."""
    if chance.random() < 0.5:
        # Without overlap scheduling and pages.
        layout.pop("page-size", None)
        return {"mamba-radix-cache-strategy": "no_buffer", "disable-overlap-schedule": True}
    if "page-size" in layout:
        # What the cache keeps of states is at multiples of a chunk of the kernels.
        layout["page-size"] = 64
        layout["chunked-prefill-size"] = max(layout.get("chunked-prefill-size", 64), 64)
    return {"mamba-radix-cache-strategy": "extra_buffer", "mamba-track-interval": 64}
