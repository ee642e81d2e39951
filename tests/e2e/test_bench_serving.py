"""`python -m sglang.bench_serving` against a server of this package, as scripts/bench_sweep.py runs it."""

import pytest
from bench.client import BenchServing
from bench.engine import environment
from bench.prompts import TINY_PROMPTS, Prompts
from bench.workload import APIS, Load, Serving, Workload
from serving import DEFAULT, DEVICE_FLAGS, Settings, trees
from support.recorded import CANDIDATES, record

NEW_TOKENS = 96
NUM_REQUESTS = 8


def workload_of(api: str, prompts: Prompts) -> Workload:
    return Workload(
        measure="serving",
        prompts=[prompts],
        concurrency=[2],
        new_tokens=NEW_TOKENS,
        plain_tokens=0,
        requests=[NUM_REQUESTS],
        accept_length=None,
        recorded_drafts=None,
        chat_arguments={},
        temperatures=[0.0],
        serving=Serving(api, [None], context_tokens=512, own_lengths=False),
    )


@pytest.fixture(scope="module")
def client():
    client = BenchServing(environment("none", DEVICE_FLAGS["device"]))
    yield client
    client.stop()


def url_of(server) -> str:
    return f"http://127.0.0.1:{server.get('/server_info')['port']}"


@pytest.mark.parametrize("settings", [DEFAULT], indirect=True, ids=str)
@pytest.mark.parametrize("api", APIS)
def test_bench_serving(pair, client, api):
    """All requests are answered, and bench_serving finds this run's acceptance in `/server_info`.

    SGLang updates it every 40 decode steps. These answers take twice as many.
    """
    server = pair.dflash

    found = client.run(url_of(server), workload_of(api, Prompts(TINY_PROMPTS, None)), Load(0, 2), "ours", False)

    # The tiny pair's texts do not end by themselves.
    assert found["tokens_per_s"] == pytest.approx(NEW_TOKENS * found["requests_per_s"])
    assert 2 < found["accept_length"] < 16
    assert found["accept_length"] == server.internal_state()["avg_spec_accept_length"]
    assert 0 < found["itl_ms"] <= found["itl_p99_ms"]
    assert found["tpot_ms"] > 0
    assert 0 < found["ttft_ms"] <= found["ttft_p99_ms"]


@pytest.mark.parametrize("num_nodes", [None, 16], ids=["chains", "trees"])
def test_recorded_drafts(keeper, client, tmp_path, num_nodes):
    """Requests of random tokens get the recorded drafts: the right one is second, so only trees have it."""
    file = record(tmp_path / "drafts.safetensors")
    settings = Settings(
        f"bench-recorded-{num_nodes}",
        dflash_flags=() if num_nodes is None else trees(CANDIDATES, num_nodes),
        env=(("SGLANG_DFLASH_RECORDED_DRAFTS", file),),
    )
    server = keeper.server(settings, dflash=True)

    found = client.run(url_of(server), workload_of(APIS[0], Prompts(None, 64)), Load(0, 2), "ours", False)

    assert found["tokens_per_s"] == pytest.approx(NEW_TOKENS * found["requests_per_s"])
    assert found["accept_length"] == pytest.approx(1 if num_nodes is None else 4, abs=0.1)


def test_a_process_that_ended_is_an_error():
    client = BenchServing(environment("none", DEVICE_FLAGS["device"]))
    try:
        with pytest.raises(RuntimeError, match="bench_serving ended with status"):
            client.run("http://127.0.0.1:9", workload_of("no-such-api", Prompts(None, 64)), Load(0, 2), "ours", False)
    finally:
        client.stop()
