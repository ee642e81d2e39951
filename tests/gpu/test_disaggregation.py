"""Prefill and decode Engines on one GPU and on two, KV over Mooncake: text up to ties, acceptance of one Engine."""

import importlib.metadata
from concurrent.futures import ThreadPoolExecutor

import pytest
from bench.ports import claim_port
from engines import tiny
from pairs import TIE, flat, pair_calls, plain_answers
from support.engine_process import EngineProcess
from support.ties import compare, tokens_per_cycle

# Mooncake's wheel without CUDA cannot read a GPU's memory.
WHEELS = {"mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"}
ENV = {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp", "SGLANG_HOST_IP": "127.0.0.1"}
FLAGS = {"attention_backend": "fa3"}


@pytest.mark.gpu
@pytest.mark.skipif(
    WHEELS.isdisjoint(distribution.name for distribution in importlib.metadata.distributions()),
    reason="needs one of Mooncake's wheels with CUDA",
)
@pytest.mark.group("disaggregation-{gpus}")
@pytest.mark.parametrize("shape", ["chains", "trees"])
@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=pytest.mark.alone(gpus=2))])
def test_text(gpus, shape, engines, prompts):
    calls = pair_calls(prompts)
    of_plain, _ = plain_answers(engines, "fa3", prompts)
    config = tiny(f"one-engine-{shape}", shape, attention_backend="fa3")
    alone = flat(engines.ask(config, calls))
    engines.stop()
    port, claim = claim_port()
    asked = []
    for i, call in enumerate(calls):
        size = len(call["input_ids"])
        rooms = {"bootstrap_host": ["127.0.0.1"] * size, "bootstrap_port": [port] * size}
        asked.append(call | rooms | {"bootstrap_room": [1000 * i + row + 1 for row in range(size)], "flush": False})
    arguments = dict(tiny("disaggregated", shape, **FLAGS).arguments) | {"disaggregation_bootstrap_port": port}
    roles = [
        EngineProcess(arguments | {"disaggregation_mode": role, "base_gpu_id": i % gpus}, ENV)
        for i, role in enumerate(("prefill", "decode"))
    ]
    try:
        with ThreadPoolExecutor(2) as threads:
            _, (answers, _) = threads.map(lambda role: role.ask(asked), roles)
    finally:
        for role in roles:
            role.stop()
        claim.close()

    answers = flat(answers)
    compared = compare(of_plain, answers)
    rates = tokens_per_cycle(answers), tokens_per_cycle(alone)
    print(f"\n{shape} on {gpus} GPUs: {compared}, {rates[0]:.3f} tokens per cycle, {rates[1]:.3f} on one Engine")
    compared.assert_ties(TIE)
    assert rates[0] > 0.97 * rates[1]
