"""`python -m sglang.bench_serving` against a server of this package, as scripts/bench_sweep.py runs it."""

import pytest
from bench.client import bench_serving
from bench.engine import APIS, Load, Serving, Workload, environment
from bench.prompts import TINY_PROMPTS, Prompts
from serving import DEFAULT, DEVICE_FLAGS

NEW_TOKENS = 96
NUM_REQUESTS = 8


@pytest.mark.parametrize("settings", [DEFAULT], indirect=True, ids=str)
@pytest.mark.parametrize("api", APIS)
def test_bench_serving(pair, api):
    """All requests are answered, and bench_serving finds this run's acceptance in `/server_info`.

    SGLang updates it every 40 decode steps. These answers take twice as many.
    """
    server = pair.dflash
    workload = Workload(
        measure="serving",
        prompts=[Prompts(TINY_PROMPTS, None)],
        concurrency=[2],
        new_tokens=NEW_TOKENS,
        plain_tokens=0,
        requests=NUM_REQUESTS,
        accept_length=None,
        recorded_drafts=None,
        chat_arguments={},
        temperatures=[0.0],
        serving=Serving(api, [None], context_tokens=512, own_lengths=False),
    )
    url = f"http://127.0.0.1:{server.get('/server_info')['port']}"

    found = bench_serving(url, workload, Load(0, 2), is_dummy=False, env=environment("none", DEVICE_FLAGS["device"]))

    # The tiny pair's texts do not end by themselves.
    assert found["tokens_per_s"] == pytest.approx(NEW_TOKENS * found["requests_per_s"])
    assert 2 < found["accept_length"] < 16
    assert found["accept_length"] == server.internal_state()["avg_spec_accept_length"]
    assert 0 < found["itl_ms"] <= found["itl_p99_ms"]
    assert found["tpot_ms"] > 0
    assert 0 < found["ttft_ms"] <= found["ttft_p99_ms"]
