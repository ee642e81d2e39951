"""Configurations of engines, and the load that they are measured with."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from bench.prompts import Prompts

MODES = ("none", "in-tree", "vllm", "ours")
# `--backend` of bench_serving: `/generate` and `/v1/chat/completions`.
APIS = ("sglang", "sglang-oai-chat")

# Length of the short answers that long ones are compared with.
SHORT_TOKENS = 64
# Fewest requests of one measurement. With fewer the figures of one client would be noisy.
_MIN_REQUESTS = 16
# Spare KV slots per request, for the blocks in flight.
SPARE_TOKENS = 128


@dataclass(frozen=True)
class Configuration:
    """Configuration of one engine.

    Attributes:
        mode: one of `MODES`.
        target: name of the target.
        drafter: name of the drafter; None without speculation.
        backend: attention backend.
        tp: number of GPUs.
        block_size: None without speculation, or to use the drafter's.
        draft_window: context tokens that the drafter sees; None without speculation, or for all.
        nodes: nodes of a draft tree; None for chains.
        adaptive: whether the draft length adapts.
    """

    mode: str
    target: str
    drafter: str | None
    backend: str
    tp: int = 1
    block_size: int | None = None
    draft_window: int | None = None
    nodes: int | None = None
    adaptive: bool = False

    def __str__(self) -> str:
        drafts = drafting(self.block_size, self.draft_window, self.nodes, self.adaptive)
        return f"{self.mode}, {self.backend}, tp {self.tp}{drafts}"


def drafting(block_size: int | None, draft_window: int | None, nodes: int | None, adaptive: bool) -> str:
    """Return a suffix for the name of a configuration: its options of drafting that differ from the default."""
    block = "" if block_size is None else f", block {block_size}"
    window = "" if draft_window is None else f", window {draft_window}"
    tree = "" if nodes is None else f", tree {nodes}"
    return block + window + tree + (", adaptive" if adaptive else "")


@dataclass(frozen=True)
class Load:
    """One point of a sweep.

    Attributes:
        prompts: index into the workload's prompts.
        concurrency: clients, or requests in the batch.
        request_rate: arrivals per second; None if a client sends its next request when it has an answer.
        temperature: of all requests.
    """

    prompts: int
    concurrency: int
    request_rate: float | None = None
    temperature: float = 0.0


@dataclass(frozen=True)
class Serving:
    """Options of `sglang.bench_serving`.

    Attributes:
        api: its `--backend`, one of `APIS`.
        request_rates: rates to measure; None stands for as fast as the clients ask.
        context_tokens: limit for a prompt with its answer; longer ones of a dataset are left out.
        own_lengths: whether answers are as long as those of the dataset.
        default_flags: whether servers have default flags.
        vllm_python: interpreter of an environment with vLLM; None: vLLM is not measured.
    """

    api: str
    request_rates: list[float | None]
    context_tokens: int
    own_lengths: bool
    default_flags: bool = False
    vllm_python: str | None = None


@dataclass(frozen=True)
class Workload:
    """Load of the engines, and the kind of measurement.

    Attributes:
        measure: "requests" (clients in a closed loop), "decode" (a batch that decodes in step) or "serving" (an HTTP
            server).
        prompts: sets of prompts to measure.
        concurrency: numbers of clients, or of requests in the batch, to measure.
        new_tokens: length of every answer. Answers to a dataset may end earlier.
        plain_tokens: for "decode", new tokens without speculation, where every cycle yields one.
        requests: for "requests" and "serving", answers per measurement for each of `concurrency`; None for 4 per
            client, and at least 16.
        plain_requests: as `requests`, without speculation; None for the same number.
        accept_length: acceptance length to simulate; None to measure the drafter's.
        recorded_drafts: file of drafts to simulate; None to measure the drafter's.
        chat_arguments: for the chat template of the target's tokenizer.
        temperatures: for "requests", temperatures to measure.
        engine_arguments: arguments of every engine, which override the defaults.
        serving: options for "serving", else None.
    """

    measure: str
    prompts: list[Prompts]
    concurrency: list[int]
    new_tokens: int
    plain_tokens: int
    requests: list[int] | None
    accept_length: float | None
    recorded_drafts: str | None
    chat_arguments: dict
    temperatures: list[float]
    engine_arguments: dict = field(default_factory=dict)
    serving: Serving | None = None
    plain_requests: list[int] | None = None

    @property
    def loads(self) -> list[Load]:
        rates = [None] if self.serving is None else self.serving.request_rates
        places = itertools.product(range(len(self.prompts)), self.concurrency, rates, self.temperatures)
        return [Load(*place) for place in places]

    def num_requests(self, concurrency: int, mode: str) -> int:
        requests = self.plain_requests if mode == "none" and self.plain_requests else self.requests
        if requests is None:
            return max(_MIN_REQUESTS, 4 * concurrency)
        return requests[self.concurrency.index(concurrency)]

    @property
    def answer_tokens(self) -> int:
        """Return the KV slots that the longest answer to a request takes."""
        return SHORT_TOKENS + max(self.new_tokens, self.plain_tokens) + SPARE_TOKENS

    @property
    def positions(self) -> int:
        """Return the positions that a model needs for prompts of random tokens, whose length is known in advance."""
        return max(prompts.tokens for prompts in self.prompts) + self.answer_tokens
