"""Prefill and decode on different servers: text, acceptance and penalties are those of one server.

Mooncake moves KV over loopback (`pip install mooncake-transfer-engine-non-cuda`; it needs libibverbs1, libnl-3-200,
libnl-route-3-200 and libnuma1).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from bench.ports import claim_port
from oracle import assert_same_cycles
from serving import PLAIN_SYNC, RETRACT, SYNC, Server, Settings, assert_same_answers, generate_body, trees

pytest.importorskip("mooncake.engine")

ENV = (("MC_FORCE_TCP", "1"), ("MOONCAKE_PROTOCOL", "tcp"), ("SGLANG_HOST_IP", "127.0.0.1"))
# Retracted requests have their KV in host memory.
DECODE = (
    ("disaggregation-mode", "decode"),
    ("hicache-io-backend", "direct"),
    ("hicache-mem-layout", "layer_first"),
    # Of requests that arrive, more slots are in use than may run.
    ("max-running-requests", 4),
)
CHAINS = Settings("disaggregated", dflash_flags=DECODE, plain=PLAIN_SYNC)
TREES = Settings(
    "disaggregated-trees-retracted",
    dflash_flags=(*DECODE, *trees(8), ("page-size", 16)),
    env=RETRACT,
    plain=PLAIN_SYNC,
)
pytestmark = [
    pytest.mark.parametrize("settings", [CHAINS, TREES], indirect=True, ids=str),
    pytest.mark.cpu(reason="the transfers of a CPU"),
]


@dataclass
class Disaggregated:
    """A prefill and a decode server, and the client that sends each request to both."""

    prefill: Server
    decode: Server
    port: int

    def __post_init__(self) -> None:
        self._rooms = random.Random(0)

    def generate(self, input_ids: list[int], **options) -> dict:
        room = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.port,
            "bootstrap_room": self._rooms.getrandbits(40),
        }
        body = generate_body(input_ids, options) | room
        with ThreadPoolExecutor(1) as threads:
            prefilled = threads.submit(self.prefill.try_post, "/generate", body)
            answer = self.decode.post("/generate", body)
            assert prefilled.result().status_code == 200
        return answer

    def generate_concurrently(self, requests: list[dict]) -> list[dict]:
        with ThreadPoolExecutor(len(requests)) as threads:
            return list(threads.map(lambda request: self.generate(**request), requests))


@pytest.fixture(scope="module")
def both(settings, tmp_path_factory) -> Iterator[Disaggregated]:
    port, claim = claim_port()
    bootstrap = (("disaggregation-bootstrap-port", port),)
    folder = tmp_path_factory.mktemp("servers")
    own = [flag for flag in settings.dflash_flags if flag not in DECODE]
    # Without overlap scheduling: it would wait for a CUDA event.
    prefill = Settings("prefill", dflash_flags=(*bootstrap, *own, ("disaggregation-mode", "prefill"), SYNC), env=ENV)
    decode = Settings("decode", dflash_flags=(*bootstrap, *settings.dflash_flags), env=(*ENV, *settings.env))
    servers = [Server(each, True, folder / f"{each}.log") for each in (prefill, decode)]
    try:
        for server in servers:
            server.wait_until_ready()
        yield Disaggregated(*servers, port)
    finally:
        for server in servers:
            server.stop()
        claim.close()


@pytest.fixture
def plain(keeper, settings) -> Server:
    return keeper.server(settings.plain, dflash=False)


def test_text_and_acceptance(both, plain, settings, prompts, oracle):
    some = [*prompts[:7], sum(prompts[30:33], [])]
    requests = [{"input_ids": prompt, "max_new_tokens": 50, "ignore_eos": True} for prompt in some]

    answers = both.generate_concurrently(requests)

    assert_same_answers(answers, plain.generate_concurrently(requests))
    for prompt, answer in zip(some, answers):
        assert_same_cycles(answer, oracle.generate(prompt, 50, ignore_eos=True, **settings.cycles))
    retractions = sum(answer["meta_info"].get("num_retractions", 0) for answer in answers)
    assert (retractions > 0) is bool(settings.env)


def test_only_decode_reserves_memory_for_cycles(both):
    prefill, decode = (
        server.internal_state()["sglang_dflash"]["cycle_bytes"] for server in (both.prefill, both.decode)
    )
    # Prompts need the drafter's projections of its context.
    assert {name for name, num_bytes in prefill.items() if num_bytes} == {"context"}
    assert decode["logits"] > 0 and decode["sampler"] > 0 and decode["penalties"] > 0


def test_penalties_in_slots_of_other_requests(both, plain, prompts):
    penalties = {"frequency_penalty": 0.8}, {"repetition_penalty": 1.4}, {"presence_penalty": 0.9, "min_new_tokens": 20}
    requests = [
        {"input_ids": prompts[8 + i], "max_new_tokens": 50, "ignore_eos": True}
        | ({} if i % 4 == 3 else penalties[i % 4])
        for i in range(12)
    ]

    assert_same_answers(both.generate_concurrently(requests), plain.generate_concurrently(requests))


def test_aborted_requests_leave_others_alone(both, plain, prompts):
    requests = [{"input_ids": prompt, "max_new_tokens": 60, "ignore_eos": True} for prompt in prompts[20:24]]
    long = {"rid": "long", "max_new_tokens": 1000, "ignore_eos": True}
    with ThreadPoolExecutor(1) as threads:
        aborted = threads.submit(both.generate, prompts[24], **long)
        answers = both.generate_concurrently(requests)
        both.decode.post("/abort_request", {"rid": "long"})
        assert aborted.result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert_same_answers(answers, plain.generate_concurrently(requests))
    for server in (both.prefill, both.decode):
        server.wait_until_empty()
