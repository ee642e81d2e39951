"""scripts/bench_sweep.py --measure serving: start of servers, requests of bench_serving, and the figures kept."""

import argparse
import json
from pathlib import Path

import bench_sweep
import msgspec
import pytest
from bench.client import client_flags, dataset_flags, figures
from bench.engine import engine_arguments
from bench.pairs import TINY_PAIR
from bench.prompts import serving_format
from bench.server import kv_tokens, server_arguments, server_flags
from bench.workload import Load, Workload
from sglang.benchmark.datasets import get_dataset
from sglang.srt.server_args import ServerArgs
from transformers import AutoTokenizer


def write(path, *rows) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    """Return datasets of two requests in every format that bench_serving reads, and in one that it does not."""
    conversations = [
        {
            "conversations": [
                {"from": "human", "value": f"def f{i}():\n    return"},
                {"from": "gpt", "value": " 12345\n"},
            ]
        }
        for i in range(2)
    ]
    requests = [{"messages": [{"role": "user", "content": f"class C{i}:"}], "max_tokens": 9} for i in range(2)]
    (tmp_path / "sharegpt.json").write_text(json.dumps(conversations))
    return {
        "sharegpt": str(tmp_path / "sharegpt.json"),
        "custom": write(tmp_path / "custom.jsonl", *conversations),
        "openai": write(tmp_path / "openai.jsonl", *requests),
        "questions": write(tmp_path / "questions.jsonl", {"prompt": "import os"}, {"prompt": "import sys"}),
    }


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('[\n {"conversations": []}]', "sharegpt"),
        ('\n{"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 8}\n', "openai"),
        ('{"conversations": [{"content": "Hi."}, {"content": "Hello."}]}', "custom"),
        ('{"question": "What is in \\"messages\\"?"}', None),
        ("{", None),
        ("", None),
    ],
)
def test_formats_that_bench_serving_reads(tmp_path, text, name):
    (tmp_path / "data").write_text(text)

    assert serving_format(str(tmp_path / "data")) == name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--measure serving --own-lengths", "--own-lengths: tiny-prompts has no answers"),
        ("--measure serving --new-tokens 3", "--new-tokens 3"),
        ('--measure serving --chat-arguments {"a":1}', "--chat-arguments"),
        ("--measure serving --datasets {openai}", "--api sglang"),
        ("--measure serving --default-flags --trees 16", "--trees: not with --default-flags"),
        ("--measure serving --default-flags --modes vllm", "--vllm-python and --modes vllm"),
        ("--measure serving --default-flags --vllm-python python3", "--vllm-python and --modes vllm"),
        ("--measure serving --modes vllm --vllm-python python3", "--modes vllm: .* use --default-flags"),
        ("--vllm-python python3", "--vllm-python: only for --measure serving"),
        (
            '--measure serving --default-flags --modes vllm --vllm-python python3 --engine-arguments {"tp":2}',
            "--engine-arguments: not with --modes vllm",
        ),
        (
            "--measure serving --default-flags --modes vllm --vllm-python python3 --pairs a:b --datasets random-ids",
            "--modes vllm: b is not a local folder",
        ),
        ("--measure serving --requests 4 8", "--requests: 2 numbers for 7"),
        ("--measure serving --datasets {custom} --prompt-tokens 9", "--prompt-tokens"),
        ("--measure serving --datasets {sharegpt} --prompt-tokens 9 --own-lengths", "--own-lengths"),
    ],
)
def test_bad_flags(files, flags, message):
    for name, path in files.items():
        flags = flags.replace(f"{{{name}}}", path)
    with pytest.raises(ValueError, match=message):
        bench_sweep.plan(bench_sweep.parse([*flags.split(), "--no-chart"]))


def serving_workload(*flags: str) -> Workload:
    common = ("--measure", "serving", "--no-chart", "--device", "cpu", "--concurrency", "2", "--requests", "2")
    return bench_sweep.plan(bench_sweep.parse([*common, *flags]))[0][0].workload


def asked(flags: list[str]) -> list:
    """Return the requests that bench_serving makes of these flags."""
    parser = argparse.ArgumentParser()
    for flag in ("num-prompts", "sharegpt-output-len", "sharegpt-context-len", "random-input-len", "random-output-len"):
        parser.add_argument(f"--{flag}", type=int)
    for flag in ("dataset-name", "dataset-path", "prompt-suffix"):
        parser.add_argument(f"--{flag}", default="")
    for flag in ("apply-chat-template", "tokenize-prompt"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--random-range-ratio", type=float)
    args = parser.parse_args([*flags, "--num-prompts", "2"])
    return get_dataset(args, AutoTokenizer.from_pretrained(TINY_PAIR / "target"))


@pytest.mark.parametrize(
    ("dataset", "flags", "prompts"),
    [
        ("sharegpt", "", {"def f0():\n    return", "def f1():\n    return"}),
        ("custom", "", {"def f0():\n    return", "def f1():\n    return"}),
        ("questions", "", {"import os", "import sys"}),
        ("openai", "--api sglang-oai-chat", {"class C0:", "class C1:"}),
    ],
)
def test_what_is_asked_of_datasets(files, tmp_path, dataset, flags, prompts):
    workload = serving_workload("--datasets", files[dataset], "--new-tokens", "32", *flags.split())

    rows = asked(dataset_flags(workload, workload.prompts[0], 2, tmp_path, workload.serving.api))

    texts = {row.prompt if isinstance(row.prompt, str) else row.prompt[0]["content"] for row in rows}
    assert texts == prompts
    assert [row.output_len for row in rows] == [32, 32]


def test_answers_as_long_as_those_of_a_dataset(files, tmp_path):
    answer = len(AutoTokenizer.from_pretrained(TINY_PAIR / "target")(" 12345\n")["input_ids"])
    for dataset, length in (("sharegpt", answer), ("custom", answer), ("openai", 9)):
        workload = serving_workload("--datasets", files[dataset], "--own-lengths", "--api", "sglang-oai-chat")
        rows = asked(dataset_flags(workload, workload.prompts[0], 2, tmp_path, workload.serving.api))
        assert [row.output_len for row in rows] == [length, length]


@pytest.mark.parametrize("dataset", ["random-ids", "sharegpt", "questions"])
def test_prompts_of_a_length(files, tmp_path, dataset):
    path = files.get(dataset, dataset)
    workload = serving_workload("--datasets", path, "--prompt-tokens", "48", "--new-tokens", "32")

    rows = asked(dataset_flags(workload, workload.prompts[0], 2, tmp_path, workload.serving.api))

    assert [(len(row.prompt), row.prompt_len, row.output_len) for row in rows] == [(48, 48, 32)] * 2


def test_more_requests_than_questions(files, tmp_path):
    workload = serving_workload("--datasets", files["questions"], "--requests", "5")

    flags = dataset_flags(workload, workload.prompts[0], 5, tmp_path, workload.serving.api)

    assert len(json.loads(Path(flags[flags.index("--dataset-path") + 1]).read_text())) == 5


def test_client_flags(files, tmp_path):
    def flags(load: Load, is_dummy: bool, *more: str) -> str:
        return " ".join(client_flags(serving_workload(*more), load, "ours", is_dummy, tmp_path))

    text = flags(Load(0, 2, 1.5), False, "--datasets", files["sharegpt"])
    for part in ("--backend sglang ", "--num-prompts 2", "--max-concurrency 2", "--request-rate 1.5", "--flush-cache"):
        assert part in text
    assert "--warmup-requests 2" in text
    # Only answers of real weights to text may end early.
    assert "--disable-ignore-eos" in text
    assert "--disable-ignore-eos" not in flags(Load(0, 2), True, "--datasets", files["sharegpt"])
    assert "--disable-ignore-eos" not in flags(Load(0, 2), False, "--datasets", "random-ids")
    assert "--request-rate " not in flags(Load(0, 2), False)

    chat = ("--api", "sglang-oai-chat", "--chat-arguments", '{"enable_thinking": false}')
    body = json.dumps({"stream_options": {"include_usage": True}, "chat_template_kwargs": {"enable_thinking": False}})
    assert f"--extra-request-body {body}" in flags(Load(0, 2), False, *chat)


RESULT = {
    "completed": 2,
    "errors": ["", ""],
    "request_throughput": 3.0,
    "output_throughput": 96.0,
    "median_ttft_ms": 20.0,
    "p99_ttft_ms": 30.0,
    "median_tpot_ms": 5.0,
    "median_itl_ms": 4.0,
    "p99_itl_ms": 9.0,
    "accept_length": 4.25,
    "mean_ttft_ms": 21.0,
}


def test_figures_of_bench_serving():
    expected = {
        "requests_per_s": 3.0,
        "tokens_per_s": 96.0,
        "ttft_ms": 20.0,
        "ttft_p99_ms": 30.0,
        "tpot_ms": 5.0,
        "itl_ms": 4.0,
        "itl_p99_ms": 9.0,
        "accept_length": 4.25,
    }

    assert figures(RESULT, 2) == expected
    del expected["accept_length"]
    assert figures(RESULT | {"accept_length": None}, 2) == expected


def test_a_run_with_unanswered_requests_has_no_figures():
    with pytest.raises(RuntimeError, match="1 of 2 requests were answered; Bad Request: too long"):
        figures(RESULT | {"completed": 1, "errors": ["", "Bad Request: too long"]}, 2)
    with pytest.raises(RuntimeError, match="2 requests of up to --context-tokens, and 3 were to be asked"):
        figures(RESULT, 3)


def test_requests_of_each_number_of_clients():
    flags = ("--concurrency", "8", "1", "--requests", "64", "16", "--plain-requests", "4")
    counts = {
        mode: [serving_workload(*flags).num_requests(clients, mode) for clients in (1, 8)]
        for mode in ("none", "in-tree", "ours")
    }

    assert counts == {"none": [4, 4], "in-tree": [16, 64], "ours": [16, 64]}
    assert serving_workload("--requests", "3").num_requests(2, "none") == 3


def test_default_flags():
    """Servers run one after the other, and get no flag that a user need not set."""
    flags = ("--measure", "serving", "--default-flags", "--pairs", "qwen3-8b-normal", "--no-chart", "--device", "cuda")
    groups = bench_sweep.plan(bench_sweep.parse([*flags, "--engine-arguments", '{"enable_mixed_chunk": true}']))
    paths = {"qwen3-8b": "target", "qwen3-8b-dflash-normal": "drafter"}

    given = {
        candidate.configuration.mode: server_arguments(candidate.configuration, candidate.workload, paths, "cuda", True)
        for (candidate,) in groups
    }

    plain = {"model_path": "target", "load_format": "dummy", "enable_mixed_chunk": True}
    drafter = {
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": "drafter",
        "speculative_draft_load_format": "auto",
    }
    assert given == {"none": plain, "in-tree": plain | drafter, "ours": plain | drafter}


def test_servers_have_room_for_their_clients():
    assert kv_tokens(serving_workload("--datasets", "random-ids", "--prompt-tokens", "512", "64")) == 2 * (512 + 256)
    assert kv_tokens(serving_workload("--context-tokens", "4096")) == 2 * (4096 + 128)


@pytest.mark.parametrize("measure", ["requests", "decode", "serving"])
def test_arguments_are_those_of_sglang(measure):
    """Arguments of engines exist in SGLang, and so do the flags of servers."""
    lengths = (
        "--draft-windows",
        "4096",
        "--block-sizes",
        "8",
        "--trees",
        "32",
        "--concurrency",
        "1",
        "4",
        "--adaptive",
        "--no-chart",
    )
    given = {"prefill_decode_interval": 4, "cuda_graph_bs_prefill": [64, 128], "disable_overlap_schedule": True}
    flags = ("--device", "cuda", "--pairs", "small", "--measure", measure, *lengths)
    flags += ("--engine-arguments", json.dumps(given))
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    fields = {field.name for field in msgspec.structs.fields(ServerArgs)}
    for (candidate,) in bench_sweep.plan(bench_sweep.parse([*flags, "--together", "1"])):
        configuration, workload = candidate.configuration, candidate.workload
        paths = {"small": "target", "small-dflash": "drafter"}
        arguments = engine_arguments(configuration, workload, paths, "cuda", True)

        assert given.items() <= arguments.items() and arguments.keys() <= fields
        if measure == "serving":
            parsed = vars(parser.parse_args(server_flags(arguments)))
            assert {name: parsed[name] for name in arguments} == arguments
