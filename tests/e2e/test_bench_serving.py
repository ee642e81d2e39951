"""`python -m sglang.bench_serving` against a server of this package, as scripts/bench_sweep.py runs it."""

import subprocess
import sys
from pathlib import Path

import pytest
from bench.client import BenchServing
from bench.engine import environment
from bench.pairs import REPO
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


def vllm_python(folder: Path) -> Path:
    """Return an interpreter with a package `vllm` whose server is `support/vllm_stand_in.py`."""
    package = folder / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text((REPO / "tests" / "support" / "vllm_stand_in.py").read_text())
    info = folder / "site" / "vllm-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder / "site"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def sweep(folder: Path, python: Path | str) -> subprocess.CompletedProcess:
    flags = ["--modes", "vllm", "--vllm-python", str(python), "--pairs", "small", "--accept-length", "4"]
    flags += ["--concurrency", "2", "--requests", "4", "--prompt-tokens", "32", "--new-tokens", "16", "--repeats", "1"]
    flags += ["--models", str(folder / "models"), "--out", str(folder / "out"), "--device", "cpu", "--no-chart"]
    command = [sys.executable, "scripts/bench_sweep.py", "--measure", "serving", "--default-flags", *flags]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300)


def test_vllm(tmp_path):
    """vLLM's server gets its own flags and requests, and its versions and acceptance are in the report."""
    done = sweep(tmp_path, vllm_python(tmp_path))

    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "out.md").read_text()
    assert "vllm 9.9 on torch" in report and "vLLM through `/version`" in report
    titles, _, row = (line.split(" | ") for line in report.splitlines() if line.startswith("|"))
    row = dict(zip((title.strip("| ") for title in titles), (cell.strip("| ") for cell in row), strict=True))
    assert row["served by"] == "vllm" and row["accept length"] == "4.00" and float(row["tokens/s"]) > 0


def test_an_interpreter_without_vllm(tmp_path):
    for python, message in ((sys.executable, "No package metadata"), (tmp_path / "none", "No such file")):
        done = sweep(tmp_path, python)
        assert done.returncode == 1 and f"--vllm-python {python}" in done.stderr and message in done.stderr
