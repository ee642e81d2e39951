"""scripts/bench_sweep.py: datasets, engines that take turns, statistics, and what a resumed sweep skips."""

import json
import os
import subprocess
import sys
from pathlib import Path

import bench_sweep
import pytest
import torch
from bench import groups
from bench.chart import Panel, draw, panels
from bench.engine import Answer, accuracy, environment, summarize_answers
from bench.pairs import REPO, SHAPES, TINY_PAIR, Pair, checkpoint, find_pair, write_normal_weights
from bench.prompts import TINY_PROMPTS, Prompt, Prompts, Question, build_prompts, cut, final_number, read_dataset
from bench.results import Results, Spread, markdown, table
from bench.workload import Configuration, Load
from safetensors.torch import save_file
from support.oracle.drafter import ReferenceDrafter
from transformers import AutoTokenizer

from models.tiny import load_prompts

SETUP = {"hardware": "a machine", "versions": "sglang 0.5.23", "method": "How.", "measure": "requests", "repeats": 3}


def write(path, *rows) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


# --- prompts --------------------------------------------------------------------------------------------------------


def test_datasets(tmp_path):
    questions = read_dataset(
        write(
            tmp_path / "mixed.jsonl",
            {"question": "How many?", "answer": "2 + 3 = <<2+3=5>>5\n#### 1,005"},
            {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "    return 1"},
            {"problem": "What is \\frac{1}{2}?", "answer": "\\frac{1}{2}"},
            {"question_id": 81, "turns": ["First.", "Second."]},
        )
    )

    assert questions[0].text.startswith("How many?") and "\\boxed{}" in questions[0].text
    assert questions[0].answer == "1005"
    assert questions[1:] == [Question("def f():"), Question("What is \\frac{1}{2}?"), Question("First.")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "data.jsonl:1 is not JSON"),
        ('{"text": ""}', "data.jsonl:1 has none of the fields prompt"),
        ("", "data.jsonl is empty"),
    ],
)
def test_bad_datasets(tmp_path, text, message):
    (tmp_path / "data.jsonl").write_text(text)

    with pytest.raises(ValueError, match=message):
        read_dataset(str(tmp_path / "data.jsonl"))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is \\boxed{1,234} after 7 steps", "1234"),
        ("\\boxed{3}, no, \\boxed{-4.50}", "-4.5"),
        ("He pays $ 70,000.00.", "70000"),
        ("It takes 10 then 20 minutes.", "20"),
        ("none", None),
    ],
)
def test_final_number(text, number):
    assert final_number(text) == number


def test_accuracy_counts_only_known_answers():
    prompts = [Prompt([1], "5"), Prompt([1], "6"), Prompt([1])]

    assert accuracy(prompts, ["\\boxed{5}", "It is 7.", "anything"]) == 0.5


def test_cut_begins_elsewhere_and_wraps():
    assert cut([[1, 2], [3], [4, 5, 6]], tokens=4, count=4) == [[1, 2, 3, 4], [3, 4, 5, 6], [4, 5, 6, 1], [1, 2, 3, 4]]


@pytest.mark.parametrize(
    "prompts",
    [
        Prompts(None, 512),
        Prompts("gsm8k", None),
        Prompts("gsm8k", 64),
        Prompts("of, 9 tokens", 64),
        Prompts("9 tokens up", 7),
    ],
)
def test_prompts_are_known_by_what_is_written(prompts):
    assert Prompts.parse(str(prompts)) == prompts


def test_random_prompts_are_the_same_in_every_engine():
    first, second = (build_prompts(Prompts(None, 9), None, 3, {}) for _ in range(2))

    assert first == second
    assert [len(prompt.input_ids) for prompt in first] == [9, 9, 9]


def test_questions_are_asked_in_a_chat(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TINY_PAIR / "target")
    tokenizer.chat_template = "{% for m in messages %}# {{ m.content }}{% endfor %}{{ end }}"
    dataset = write(tmp_path / "data.jsonl", {"prompt": "def f():"})

    (asked,) = build_prompts(Prompts(dataset, None), tokenizer, 1, {"end": "!"})
    tiny = build_prompts(Prompts(TINY_PROMPTS, None), tokenizer, 1, {})

    assert asked.input_ids == tokenizer("# def f():!")["input_ids"]
    assert [tokenizer.decode(prompt.input_ids) for prompt in tiny] == load_prompts()


# --- plan -----------------------------------------------------------------------------------------------------------


def plan(*flags: str) -> list[list[str]]:
    groups = bench_sweep.plan(bench_sweep.parse(["--no-chart", "--device", "cuda", "--measure", "decode", *flags]))
    return [[f"{c.configuration.target} {c.configuration}" for c in group] for group in groups]


def test_compared_engines_live_together():
    two_backends = ("--pairs", "qwen3-8b", "--backends", "fa3", "triton")

    assert plan(*two_backends) == [
        ["qwen3-8b in-tree, fa3, tp 1", "qwen3-8b ours, fa3, tp 1"],
        ["qwen3-8b none, fa3, tp 1", "qwen3-8b none, triton, tp 1"],
        ["qwen3-8b in-tree, triton, tp 1", "qwen3-8b ours, triton, tp 1"],
    ]
    assert plan(*two_backends, "--together", "3") == [
        ["qwen3-8b in-tree, fa3, tp 1", "qwen3-8b ours, fa3, tp 1", "qwen3-8b none, fa3, tp 1"],
        ["qwen3-8b in-tree, triton, tp 1", "qwen3-8b ours, triton, tp 1", "qwen3-8b none, triton, tp 1"],
    ]
    assert [len(group) for group in plan(*two_backends, "--together", "1")] == [1] * 6


def test_small_engines_share_a_gpu_with_large_ones():
    groups = plan("--pairs", "qwen3-8b", "small", "--backends", "fa3", "flashinfer", "triton")

    assert [len(group) for group in groups] == [11, 3, 2, 2]


def test_no_speculation_is_measured_once_for_all_drafters_blocks_and_windows():
    pairs = ("--pairs", "qwen3-8b", "qwen3-8b-swa")

    groups = plan(*pairs, "--tp", "1", "2", "--block-sizes", "16", "8", "--draft-windows", "none", "4096")

    engines = [engine for group in groups for engine in group]
    assert sum(" none," in engine for engine in engines) == 2
    assert sum(" ours," in engine for engine in engines) == sum(" in-tree," in engine for engine in engines) == 16
    assert sum("window 4096" in engine for engine in engines) == 16


def test_shapes_have_positions_for_the_longest_prompt(tmp_path):
    flags = ("--pairs", "small", "--device", "cuda", "--no-chart", "--measure", "decode", "--new-tokens", "384")
    args = bench_sweep.parse([*flags, "--prompt-tokens", "512", "131000"])
    positions = bench_sweep.plan(args)[0][0].workload.positions

    config = json.loads((Path(checkpoint("small", tmp_path, positions)) / "config.json").read_text())

    assert config["max_position_embeddings"] >= 131000 + 64 + 384 + 16
    assert checkpoint("small", tmp_path) != checkpoint("small", tmp_path, positions)


def test_dummy_weights_can_speak(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint("small", tmp_path))
    ids = [4095, 0, 17, 1, 17]

    assert tokenizer.vocab_size == 4096
    assert all(tokenizer.decode([token]) for token in range(4096))
    assert tokenizer(tokenizer.decode(ids))["input_ids"] == ids
    chat = tokenizer.apply_chat_template([{"role": "user", "content": tokenizer.decode(ids)}], return_dict=False)
    assert chat == ids
    assert not (Path(checkpoint("small-dflash", tmp_path)) / "tokenizer.json").exists()


def test_normal_weights(tmp_path):
    write_normal_weights(tmp_path, SHAPES["small-dflash"])

    (tmp_path / "config.json").write_text(json.dumps(SHAPES["small-dflash"]))
    weights = ReferenceDrafter.from_pretrained(tmp_path).state_dict()
    assert (weights["norm.weight"] == 1).all()
    assert weights["fc.weight"].std().item() == pytest.approx(0.02, rel=0.02)


def test_normal_weights_outside_of_pytest(tmp_path):
    """Without the import path that pytest sets."""
    program = "from bench.pairs import REPO, SHAPES, write_normal_weights; import pathlib, sys; "
    program += "write_normal_weights(pathlib.Path(sys.argv[1]), SHAPES['small-dflash'])"
    environment = os.environ | {"PYTHONPATH": "scripts"}
    subprocess.run([sys.executable, "-c", program, tmp_path], cwd=REPO, env=environment, check=True, timeout=120)

    assert (tmp_path / "model.safetensors").exists()


def test_pairs():
    assert find_pair("a/b:c/d") == Pair("a/b", "c/d")
    with pytest.raises(ValueError, match="--pairs qwen4: expected one of tiny"):
        find_pair("qwen4")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--modes in-tree --device cpu", "--modes in-tree"),
        ("--pairs a/b:c/d", "--datasets: needed"),
        ("--pairs small --datasets x.jsonl", "--datasets: the dummy weights"),
        ("--pairs small --recorded-drafts none.safetensors", "--recorded-drafts none.safetensors: no such file"),
        ("--pairs small --recorded-drafts x --accept-length 3", "--accept-length: --recorded-drafts"),
        ("--pairs small --recorded-drafts x --temperatures 0.7", "--temperatures: --recorded-drafts"),
        ("--measure decode --prompt-tokens 64", "--measure decode: trained weights need"),
        ("--measure decode --accept-length 4", "--measure decode: trained weights need"),
        ("--datasets nowhere.jsonl", "--datasets nowhere.jsonl: no such file"),
        ("--request-rates 4", "--request-rates: only for --measure serving"),
        ("--measure decode --own-lengths", "--own-lengths: only for --measure serving"),
        ('--engine-arguments {"tp_size":2}', "--engine-arguments: tp_size"),
        ('--engine-arguments {"speculative_eagle_topk":8}', "--engine-arguments: speculative_eagle_topk"),
    ],
)
def test_bad_flags(flags, message):
    with pytest.raises(ValueError, match=message):
        bench_sweep.plan(bench_sweep.parse([*flags.split(), "--no-chart"]))


@pytest.mark.parametrize("flag", ["--concurrency", "--requests", "--repeats", "--request-rates", "--draft-windows"])
@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_numbers_must_be_positive(flag, value, capsys):
    with pytest.raises(SystemExit):
        bench_sweep.parse([f"{flag}={value}"])

    assert f"argument {flag}" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "warm"])
def test_temperatures_must_be_finite_and_not_negative(value, capsys):
    with pytest.raises(SystemExit):
        bench_sweep.parse([f"--temperatures={value}"])

    assert "argument --temperatures" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--engine-arguments", "--chat-arguments"])
@pytest.mark.parametrize("value", ["{", "[1]", "4"])
def test_json_must_be_an_object(flag, value, capsys):
    with pytest.raises(SystemExit):
        bench_sweep.parse([f"{flag}={value}"])

    assert f"argument {flag}" in capsys.readouterr().err


def test_environments_of_the_modes(monkeypatch):
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")

    assert "SGLANG_SIMULATE_ACC_LEN" not in environment("none", accept_length=6.5)
    assert "SGLANG_SIMULATE_ACC_LEN" not in environment("ours")
    assert environment("ours", accept_length=6.5)["SGLANG_SIMULATE_ACC_LEN"] == "6.5"
    assert environment("in-tree")["SGLANG_PLUGINS"] == "none"
    assert "SGLANG_PLUGINS" not in environment("ours")


def test_environment_of_recorded_drafts(tmp_path):
    """The in-tree worker accepts as many tokens per cycle as chains of the drafts commit."""
    file = str(tmp_path / "drafts.safetensors")
    save_file({"answers": torch.zeros(1)}, file, metadata={"tokens_per_cycle": "3.231"})

    ours = environment("ours", recorded_drafts=file)
    assert ours["SGLANG_DFLASH_RECORDED_DRAFTS"] == file and "SGLANG_SIMULATE_ACC_LEN" not in ours
    in_tree = environment("in-tree", recorded_drafts=file)
    assert in_tree["SGLANG_SIMULATE_ACC_LEN"] == "3.231" and "SGLANG_DFLASH_RECORDED_DRAFTS" not in in_tree
    assert not {"SGLANG_SIMULATE_ACC_LEN", "SGLANG_DFLASH_RECORDED_DRAFTS"} & set(environment("none"))


# --- figures --------------------------------------------------------------------------------------------------------


def test_summary_of_answers():
    answers = [
        Answer(sent=0.0, first=1.0, last=3.0, cycles=2, output_ids=list(range(9))),
        Answer(sent=1.0, first=1.5, last=4.5, cycles=6, output_ids=list(range(13))),
        # This answer ends with its prefill, so it must not count in the cost of decoding.
        Answer(sent=3.0, first=5.0, last=5.0, cycles=0, output_ids=[1]),
    ]

    assert summarize_answers(answers) == {
        "tokens_per_s": pytest.approx(23 / 5),
        "ttft_ms": pytest.approx(1000),
        "tpot_ms": pytest.approx(250),
        "cycle_ms": pytest.approx(5000 / 8),
        "accept_length": pytest.approx(20 / 8),
    }


def test_spread():
    assert Spread.of([3.0, 1.0, 10.0]) == Spread(3, 1, 10)
    assert Spread.of([3.0, 1.0, 10.0]).text(1) == "3.0 (1.0 to 10.0)"
    assert Spread.of([2.001, 1.999]).text(1) == "2.0"


def runs_of(mode: str, rates: list[float], **changes) -> list[dict]:
    key = {
        "mode": mode,
        "target": "org/target",
        "drafter": None if mode == "none" else "org/drafter",
        "backend": "fa3",
        "tp": 1,
        "block_size": None,
        "draft_window": None,
        "nodes": None,
        "adaptive": False,
        "prompts": "512 tokens",
        "temperature": 0.0,
        "concurrency": 8,
        "request_rate": None,
    }
    return [key | changes | {"repeat": i, "tokens_per_s": rate} for i, rate in enumerate(rates)]


def last_cells(results: Results) -> list[list[str]]:
    """Return mode, tokens/s and both speed-ups of every row."""
    return [[cell.strip() for cell in row.split("|")[8:-1]] for row in table(results)[2:]]


def test_speedups_are_taken_turn_by_turn(tmp_path):
    results = Results(tmp_path / "r.json", SETUP)
    in_tree = runs_of("in-tree", [100.0, 50.0, 200.0])
    results.add_round(runs_of("ours", [110.0, 60.0, 200.0]) + in_tree + runs_of("none", [10.0, 10.0, 10.0]), "command")

    assert last_cells(results) == [
        ["none", "10.0", "", ""],
        ["in-tree", "100.0 (50.0 to 200.0)", "10.000 (5.000 to 20.000)", ""],
        ["ours", "110.0 (60.0 to 200.0)", "11.000 (6.000 to 20.000)", "1.100 (1.000 to 1.200)"],
    ]


def test_speedups_need_the_same_setting(tmp_path):
    results = Results(tmp_path / "r.json", SETUP)
    results.add_round(runs_of("ours", [110.0], block_size=8) + runs_of("in-tree", [100.0]), "command")
    results.add_round(runs_of("none", [10.0]) + runs_of("ours", [30.0], concurrency=1), "command")

    assert [row[-2:] for row in last_cells(results)] == [["", ""], ["", ""], ["10.000", ""], ["11.000", ""]]


# --- resume ---------------------------------------------------------------------------------------------------------


class FakeEngines:
    """Replacement of `EngineProcess` and `ServerProcess` that records which engine is asked, and when."""

    def __init__(self, monkeypatch) -> None:
        self.log: list[str] = []
        self.fail_at: int | None = None
        self.broken: str | None = None
        engines = self

        class Process:
            name = ""

            def __init__(self, configuration: Configuration, *_) -> None:
                self.configuration = configuration
                engines.log.append(f"start {configuration.mode}{self.name}")

            def wait_until_ready(self) -> None:
                if self.configuration.mode == engines.broken:
                    raise RuntimeError(f"{engines.broken} does not start")

            def warm_up(self, load: Load) -> None:
                arrivals = "" if load.request_rate is None else f" at {load.request_rate:g}/s"
                sampled = f" at T {load.temperature:g}" if load.temperature else ""
                engines.log.append(f"{self.configuration.mode} {load.concurrency}{arrivals}{sampled}")

            def measure(self, load: Load) -> dict:
                self.warm_up(load)
                if len(engines.log) == engines.fail_at:
                    raise KeyboardInterrupt
                return {"tokens_per_s": float(load.concurrency)}

            def stop(self) -> None:
                pass

        class Server(Process):
            name = " server"

        monkeypatch.setattr(groups, "EngineProcess", Process)
        monkeypatch.setattr(groups, "ServerProcess", Server)


@pytest.fixture
def engines(monkeypatch):
    return FakeEngines(monkeypatch)


def sweep(path, *flags: str) -> Results:
    args = bench_sweep.parse(["--modes", "none", "ours", "--repeats", "2", "--no-chart", *flags])
    results = Results(path, SETUP)
    bench_sweep.run(bench_sweep.plan(args), args, results)
    return results


def test_engines_take_turns(tmp_path, engines):
    results = sweep(tmp_path / "r.json", "--concurrency", "4", "1")

    turn = ["ours {0}", "none {0}"]
    # A warm-up, and two repeats.
    expected = ["start ours", "start none", *(line.format(n) for n in (1, 4) for line in turn * 3)]
    assert engines.log == expected
    assert len(results.runs) == 8


def test_servers_take_turns_at_every_rate(tmp_path, engines):
    flags = ("--measure", "serving", "--concurrency", "4", "--repeats", "1", "--request-rates")
    results = sweep(tmp_path / "r.json", *flags, "inf", "2.5")

    turns = [f"{mode} 4{rate}" for rate in (" at 2.5/s", "") for mode in ("ours", "none") * 2]
    assert engines.log == ["start ours server", "start none server", *turns]
    assert [run["request_rate"] for run in results.runs] == [2.5, 2.5, None, None]

    engines.log.clear()
    assert len(sweep(tmp_path / "r.json", *flags, "inf", "2.5", "8").runs) == 6
    assert engines.log == ["start ours server", "start none server", *["ours 4 at 8/s", "none 4 at 8/s"] * 2]


def test_engines_take_turns_at_every_temperature(tmp_path, engines):
    results = sweep(tmp_path / "r.json", "--concurrency", "4", "--repeats", "1", "--temperatures", "0.7", "0")

    turns = [f"{mode} 4{sampled}" for sampled in ("", " at T 0.7") for mode in ("ours", "none") * 2]
    assert engines.log == ["start ours", "start none", *turns]
    assert [row.split("|")[7].strip() for row in table(results)] == ["temperature", "---", "0", "0", "0.7", "0.7"]
    assert [panel.title for panel in panels(results)] == [
        f"tiny, torch_native, tp 1, tiny-prompts{sampled}" for sampled in ("", ", temperature 0.7")
    ]


def test_a_resumed_sweep_measures_what_is_missing(tmp_path, engines):
    path = tmp_path / "r.json"
    engines.fail_at = 11
    with pytest.raises(KeyboardInterrupt):
        sweep(path, "--concurrency", "1", "4")
    engines.log.clear()
    engines.fail_at = None

    # All repeats of the interrupted round are measured again, because engines must take turns.
    assert len(Results(path, SETUP).runs) == 4
    sweep(path, "--concurrency", "1", "4")
    assert engines.log == ["start ours", "start none", *["ours 4", "none 4"] * 3]

    engines.log.clear()
    assert len(sweep(path, "--concurrency", "1", "4").runs) == 8
    assert engines.log == []


def test_an_engine_that_does_not_start_is_left_for_later(tmp_path, engines):
    path = tmp_path / "r.json"
    engines.broken = "ours"
    with pytest.raises(RuntimeError, match="ours does not start"):
        sweep(path, "--concurrency", "1")

    assert [run["mode"] for run in Results(path, SETUP).runs] == ["none", "none"]
    engines.broken = None
    assert len(sweep(path, "--concurrency", "1").runs) == 4


def test_another_setup_is_refused(tmp_path, engines):
    path = tmp_path / "r.json"
    sweep(path, "--concurrency", "1")

    with pytest.raises(ValueError, match="measured with another hardware;"):
        Results(path, SETUP | {"hardware": "another machine"})
    assert len(Results.load(path).runs) == 4


def test_rows_are_in_the_order_of_prompt_lengths(tmp_path):
    results = Results(tmp_path / "r.json", SETUP)
    for tokens in (131000, 512, 8192):
        results.add_round(runs_of("none", [10.0], prompts=f"{tokens} tokens"), "command")

    assert [row.split("|")[6].strip() for row in table(results)[2:]] == ["512 tokens", "8192 tokens", "131000 tokens"]


def test_arrivals_have_a_column_and_a_panel(tmp_path):
    results = Results(tmp_path / "r.json", SETUP | {"measure": "serving"})
    for rate, tokens in ((4.0, 40.0), (None, 100.0), (16.0, 90.0)):
        results.add_round(runs_of("ours", [tokens], request_rate=rate), "command")

    line = ("ours", "org/drafter", None, None, None, False)
    points = {4.0: Spread(40, 40, 40), 16.0: Spread(90, 90, 90)}
    assert [row.split("|")[8].strip() for row in table(results)] == ["arrivals/s", "---", "4.0", "16.0", ""]
    assert panels(results) == [Panel("org/target, fa3, tp 1, 512 tokens, concurrency 8", "arrivals/s", {line: points})]


def test_other_files_are_refused(tmp_path):
    (tmp_path / "r.json").write_text('{"setup": {}, "runs": []}')

    with pytest.raises(ValueError, match=r"r\.json is not a sweep's"):
        Results(tmp_path / "r.json", SETUP)
    with pytest.raises(ValueError, match=r"r\.json is not a sweep's"):
        Results.load(tmp_path / "r.json")


def test_a_chart_has_a_panel_along_every_axis(tmp_path):
    results = Results(tmp_path / "r.json", SETUP)
    results.add_round(runs_of("ours", [110.0, 60.0, 80.0]), "command")
    alone = panels(results)
    results.add_round(
        runs_of("ours", [120.0], concurrency=16) + runs_of("ours", [70.0], prompts="64 tokens"), "command"
    )

    line = ("ours", "org/drafter", None, None, None, False)
    here = Spread(80, 60, 110)
    assert alone == [Panel("org/target, fa3, tp 1, 512 tokens", "concurrency", {line: {8: here}})]
    assert panels(results) == [
        Panel("org/target, fa3, tp 1, 512 tokens", "concurrency", {line: {8: here, 16: Spread(120, 120, 120)}}),
        Panel("org/target, fa3, tp 1, concurrency 8", "prompt tokens", {line: {512: here, 64: Spread(70, 70, 70)}}),
    ]


def test_a_chart_of_decoding_shows_cycles(tmp_path):
    results = Results(tmp_path / "r.json", SETUP | {"measure": "decode"})
    results.add_round([run | {"cycle_ms": 8.0} for run in runs_of("ours", [110.0])], "command")

    (panel,) = panels(results)
    assert list(panel.lines.values()) == [{8: Spread(8, 8, 8)}]


def test_report(tmp_path):
    results = Results(tmp_path / "r.json", SETUP)
    for concurrency in (1, 8):
        results.add_round(
            runs_of("ours", [110.0, 60.0], concurrency=concurrency)
            + runs_of("none", [10.0, 9.0], concurrency=concurrency),
            "2026-11-21: python3 scripts/bench_sweep.py",
        )

    draw(results, tmp_path / "r.png")
    text = markdown(results, "a title", "r.png")

    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    for part in ("# a title", "a machine; sglang 0.5.23", "2026-11-21: python3 scripts/bench_sweep.py", "![", "8.833"):
        assert part in text
