"""Compare no speculation, SGLang's in-tree DFLASH, vLLM's and this package in one command.

On a CPU, with the tiny pair that this package ships:

    python3 scripts/bench_sweep.py --concurrency 1 4 16 64 --requests 64 --new-tokens 64 --out work/tiny_pair_cpu

On a GPU, decoding alone. Weights are dummies in the shape of real models, and acceptance is simulated:

    python3 scripts/bench_sweep.py --measure decode --pairs qwen3-8b small --concurrency 1 8 32 \\
        --backends fa3 flashinfer triton --new-tokens 384 --out work/decode

Cost of a cycle as the context grows, with a window for the drafter and without:

    python3 scripts/bench_sweep.py --measure decode --pairs small --modes in-tree ours --concurrency 1 \\
        --prompt-tokens 512 8192 32768 65536 131000 --draft-windows none 4096 --new-tokens 384 --out work/growth

HTTP servers, measured by SGLang's own `bench_serving`, for numbers of clients and arrival rates:

    python3 scripts/bench_sweep.py --measure serving --pairs qwen3-8b --concurrency 1 8 32 64 --prompt-tokens 512 \\
        --new-tokens 256 --out work/serving
    python3 scripts/bench_sweep.py --measure serving --pairs Qwen/Qwen3-8B:z-lab/Qwen3-8B-DFlash-b16 --concurrency 64 \\
        --datasets ShareGPT_V3_unfiltered_cleaned_split.json --own-lengths --request-rates 1 2 4 8 inf --out work/rates

The same with default flags, and with vLLM's server from an environment of its own:

    python3 scripts/bench_sweep.py --measure serving --pairs qwen3-8b --default-flags --concurrency 1 8 32 \\
        --prompt-tokens 512 --new-tokens 256 --recorded-drafts scripts/bench/smollm2_drafts.safetensors \\
        --modes vllm ours --vllm-python ~/vllm/bin/python --out work/vllm

With checkpoints and a dataset (JSONL of GSM8K, HumanEval, MATH-500 or MT-Bench; GSM8K's answers give the accuracy):

    python3 scripts/bench_sweep.py --pairs Qwen/Qwen3-8B:z-lab/Qwen3-8B-DFlash-b16 --datasets gsm8k.jsonl \\
        --concurrency 1 2 4 8 16 32 64 --new-tokens 2048 --chat-arguments '{"enable_thinking": false}'

Every engine or server is a process of its own. Those that are compared run at the same time and take turns, so that
drift affects all of them. OUT.json keeps the measurements. The same command, or one with more pairs, backends or
lengths, continues where it was stopped. OUT.md and OUT.png show the measurements.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import shlex
import signal
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path

from bench.arguments import json_object, number_or_none, positive, temperature
from bench.chart import draw
from bench.engine import OWN_ARGUMENTS, EngineProcess
from bench.groups import Candidate, pack, running
from bench.machine import hardware, versions
from bench.pairs import PAIRS, Pair, checkpoint, find_pair
from bench.prompts import RANDOM_IDS, TINY_PROMPTS, Prompts, read_dataset, serving_format
from bench.results import Results, markdown
from bench.server import ServerProcess
from bench.vllm import block_size, vllm_version
from bench.workload import APIS, MODES, Configuration, Load, Serving, Workload
from tqdm import tqdm

_BACKENDS = {"cuda": ["fa3"], "cpu": ["torch_native"]}
_METHODS = {
    "requests": "There are as many clients as the concurrency says, and each waits for its answer. A first round is "
    "not measured. Requests and answers are token ids. TTFT and TPOT are medians over the requests of a repeat. A "
    "cycle is the time that a request waits for its next tokens, with prefills of other requests.",
    "decode": "Steady greedy decoding of a whole batch: a long answer minus a short one. Prompts come from the radix "
    "cache.",
    "serving": "HTTP servers, measured by `python -m sglang.bench_serving`: output tokens/s, and medians of TTFT, TPOT "
    "and ITL. Before each run as many requests as there are clients warm up the server, and its radix cache is "
    "emptied. Answers to random tokens have the full length; others may end earlier.",
}
_SERVING_FLAGS = ("api", "request_rates", "context_tokens", "own_lengths", "default_flags", "vllm_python")
# Those that the figures of a report need not share.
_UNSHARED_FLAGS = ("request_rates", "vllm_python")

# Engines that take turns, and their load.
Round = tuple[list[Candidate], Load]


def plan(args: argparse.Namespace) -> list[list[Candidate]]:
    """Return groups of engines that run at the same time.

    Raises:
        ValueError: a flag cannot be used. The message names it.
    """
    by_target: dict[str, list[Pair]] = {}
    for name in args.pairs:
        pair = find_pair(name)
        if "vllm" in args.modes and not pair.is_dummy:
            block_size(checkpoint(pair.drafter, args.models))
        by_target.setdefault(pair.target, []).append(pair)
    units = []
    for pairs in by_target.values():
        units += make_units(pairs, make_workload(args, pairs[0]), args)
    return pack(units)


def make_workload(args: argparse.Namespace, pair: Pair) -> Workload:
    return Workload(
        measure=args.measure,
        prompts=make_prompts(args, pair),
        concurrency=args.concurrency,
        new_tokens=args.new_tokens,
        plain_tokens=args.plain_tokens,
        requests=args.requests,
        plain_requests=args.plain_requests,
        accept_length=accept_length(args, pair),
        recorded_drafts=None if args.recorded_drafts is None else str(args.recorded_drafts),
        chat_arguments=args.chat_arguments,
        temperatures=sorted(args.temperatures),
        engine_arguments=args.engine_arguments,
        serving=make_serving(args),
    )


def accept_length(args: argparse.Namespace, pair: Pair) -> float | None:
    """Return the acceptance length to simulate; None: recorded drafts or the drafter's own are measured."""
    if args.recorded_drafts is not None:
        return None
    return pair.accept_length if args.accept_length is None else args.accept_length


def make_serving(args: argparse.Namespace) -> Serving | None:
    """Return the options of servers; None unless servers are measured.

    Raises:
        ValueError: a flag cannot be used. The message names it.
    """
    if args.measure != "serving":
        return None
    if importlib.util.find_spec("datasets") is None:
        raise ValueError("--measure serving: SGLang's bench_serving needs the package `datasets`: install it.")
    if args.chat_arguments and args.api != "sglang-oai-chat":
        raise ValueError(f"--chat-arguments: --measure serving needs --api sglang-oai-chat for them, not {args.api}.")
    if args.new_tokens < 4:
        raise ValueError(f"--new-tokens {args.new_tokens}: bench_serving needs at least 4.")
    return Serving(
        api=args.api,
        request_rates=sorted(args.request_rates, key=lambda rate: rate or math.inf),
        context_tokens=args.context_tokens,
        own_lengths=args.own_lengths,
        default_flags=args.default_flags,
        vllm_python=args.vllm_python,
    )


def make_units(pairs: list[Pair], workload: Workload, args: argparse.Namespace) -> list[list[Candidate]]:
    """Return the engines of one target, in units of one drafter, block size, window, backend and number of GPUs.

    No speculation is measured once for all drafters, block sizes and windows.
    """

    def candidate(mode: str, pair: Pair, backend: str, tp: int, *drafting: int | bool | None) -> Candidate:
        drafter, share = (None, pair.share[1]) if mode == "none" else (pair.drafter, pair.share[0])
        configuration = Configuration(mode, pair.target, drafter, backend, tp, *drafting)
        return Candidate(configuration, workload, pair.is_dummy, 1 / args.together if args.together else share)

    units = []
    for tp in args.tp:
        for backend in args.backends:
            for pair, block, window in itertools.product(pairs, args.block_sizes, args.draft_windows):
                unit = []
                if "in-tree" in args.modes:
                    unit.append(candidate("in-tree", pair, backend, tp, block, window))
                if "vllm" in args.modes:
                    unit.append(candidate("vllm", pair, backend, tp, block, window))
                if "ours" in args.modes:
                    ways = itertools.product(args.trees, args.adaptive or [True])
                    unit += [candidate("ours", pair, backend, tp, block, window, *way) for way in ways]
                units.append(unit)
            if "none" in args.modes:
                units.append([candidate("none", pairs[0], backend, tp)])
    return units


def make_prompts(args: argparse.Namespace, pair: Pair) -> list[Prompts]:
    if pair.is_dummy:
        if args.datasets:
            raise ValueError(f"--datasets: the dummy weights of {pair.target} have no tokenizer; use --prompt-tokens.")
        return [Prompts(None, tokens) for tokens in args.prompt_tokens or [512]]
    datasets = args.datasets or ([TINY_PROMPTS] if pair == PAIRS["tiny"] else [])
    if not datasets:
        raise ValueError(f"--datasets: needed, because acceptance of {pair.drafter} depends on real text.")
    if args.measure == "serving":
        return [prompts for dataset in datasets for prompts in served_prompts(args, dataset)]
    for dataset in datasets:
        check_file(dataset)
        read_dataset(dataset)
    if args.measure == "decode" and (args.accept_length is None or not args.prompt_tokens):
        raise ValueError(
            "--measure decode: trained weights need --accept-length, because answers continue after their ends, where "
            "drafting is easy. They need --prompt-tokens, because the requests decode in step."
        )
    return [Prompts(dataset, tokens) for dataset in datasets for tokens in args.prompt_tokens or [None]]


def served_prompts(args: argparse.Namespace, dataset: str) -> list[Prompts]:
    """Return the prompts that bench_serving can make of a dataset.

    Raises:
        ValueError: a flag cannot be used. The message names it.
    """
    if dataset == RANDOM_IDS:
        return [Prompts(None, tokens) for tokens in args.prompt_tokens or [512]]
    check_file(dataset)
    name = serving_format(dataset)
    if name is None:
        read_dataset(dataset)
        if args.own_lengths:
            raise ValueError(f"--own-lengths: {dataset} has no answers.")
    if name in ("custom", "openai") and args.prompt_tokens:
        raise ValueError(f"--prompt-tokens: bench_serving cuts only ShareGPT's format; {dataset} is in {name}'s.")
    if name == "openai" and args.api != "sglang-oai-chat":
        raise ValueError(f"--api {args.api}: the requests of {dataset} are for sglang-oai-chat.")
    if args.prompt_tokens and args.own_lengths:
        raise ValueError("--own-lengths: prompts of --prompt-tokens have no answers.")
    return [Prompts(dataset, tokens) for tokens in args.prompt_tokens or [None]]


def check_file(dataset: str) -> None:
    if dataset != TINY_PROMPTS and not Path(dataset).is_file():
        raise ValueError(f"--datasets {dataset}: no such file.")


def run(groups: list[list[Candidate]], args: argparse.Namespace, results: Results) -> None:
    """Measure everything that `results` does not have yet."""
    todo = [rounds_of(group, results) for group in groups]
    total = sum(len(candidates) * args.repeats for rounds in todo for candidates, _ in rounds)
    with tqdm(total=total, unit="run", smoothing=0) as progress:
        for rounds in todo:
            if rounds:
                measure_rounds(rounds, args, results, progress)


def rounds_of(group: list[Candidate], results: Results) -> list[Round]:
    """Return the loads that are not measured yet, each with the engines that take turns."""
    by_workload: list[list[Candidate]] = []
    for candidate in group:
        same = next((others for others in by_workload if others[0].workload == candidate.workload), None)
        if same is None:
            by_workload.append([candidate])
        else:
            same.append(candidate)
    return [
        (candidates, load)
        for candidates in by_workload
        for load in candidates[0].workload.loads
        if not all(results.has(key_of(candidate, load)) for candidate in candidates)
    ]


def key_of(candidate: Candidate, load: Load) -> dict:
    return asdict(candidate.configuration) | asdict(load) | {"prompts": str(candidate.workload.prompts[load.prompts])}


def measure_rounds(rounds: list[Round], args: argparse.Namespace, results: Results, progress: tqdm) -> None:
    """Start the engines of one group, measure them in turns, and stop them."""
    group: list[Candidate] = []
    for candidates, _ in rounds:
        group += [candidate for candidate in candidates if candidate not in group]
    progress.set_postfix_str(f"starting {len(group)} engines")
    with running(group, args.device, args.models, args.logs) as engines:
        for candidates, load in rounds:
            turn = [(candidate, engine) for candidate, engine in engines if candidate in candidates]
            if not turn:
                continue
            runs = take_turns(turn, load, args.repeats, progress)
            results.add_round(runs, f"{date.today()}: python3 scripts/bench_sweep.py {shlex.join(sys.argv[1:])}")


def take_turns(
    turn: list[tuple[Candidate, EngineProcess | ServerProcess]], load: Load, repeats: int, progress: tqdm
) -> list[dict]:
    for _, engine in turn:
        engine.warm_up(load)
    runs = []
    for repeat in range(repeats):
        for candidate, engine in turn:
            key, measured = key_of(candidate, load), engine.measure(load)
            runs.append(key | {"repeat": repeat} | measured)
            arrivals = "" if load.request_rate is None else f", {load.request_rate:g} arrivals/s"
            temperature = f", temperature {load.temperature:g}" if load.temperature else ""
            progress.set_postfix_str(
                f"{candidate.configuration}, {key['prompts']}, concurrency {load.concurrency}{arrivals}{temperature}: "
                f"{measured['tokens_per_s']:.0f} tokens/s"
            )
            progress.update()
    return runs


def describe_setup(args: argparse.Namespace) -> dict:
    """Return the settings that all figures of a report must share."""
    return {
        "hardware": hardware(args.device),
        "versions": versions() if args.vllm_python is None else f"{versions()}, {vllm_version(args.vllm_python)}",
        "method": _METHODS[args.measure],
        "measure": args.measure,
        "repeats": args.repeats,
        "new_tokens": args.new_tokens,
        "plain_tokens": args.plain_tokens if args.measure == "decode" else None,
        "requests": args.requests,
        "plain_requests": args.plain_requests,
        "accept_length": args.accept_length,
        "recorded_drafts": None if args.recorded_drafts is None else args.recorded_drafts.name,
        "chat_arguments": args.chat_arguments,
        "engine_arguments": args.engine_arguments,
        "serving": {name: getattr(args, name) for name in _SERVING_FLAGS if name not in _UNSHARED_FLAGS}
        if args.measure == "serving"
        else None,
    }


def write_report(results: Results, out: Path, chart: bool) -> None:
    """Write OUT.md, and OUT.png if a chart is asked for."""
    if chart:
        draw(results, Path(f"{out}.png"))
    text = markdown(results, out.name.replace("_", " "), f"{out.name}.png" if chart else None)
    Path(f"{out}.md").write_text(text)
    print(text)


def yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise argparse.ArgumentTypeError(f"{text}: expected yes or no")
    return text == "yes"


def rate(text: str) -> float | None:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return None if math.isinf(number) else number


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    parser.add_argument("--pairs", nargs="+", default=["tiny"], help=f"names of {', '.join(PAIRS)}, or TARGET:DRAFTER")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, help="default: all but vllm; the in-tree worker needs a GPU"
    )
    parser.add_argument("--backends", nargs="+", help=f"attention backends; default: {_BACKENDS[device][0]}")
    parser.add_argument("--concurrency", nargs="+", type=positive, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--prompt-tokens", nargs="+", type=positive, help="cut prompts to these lengths")
    parser.add_argument(
        "--datasets",
        nargs="+",
        help="JSONL files. --measure serving also takes those of bench_serving: ShareGPT's JSON, JSONL of "
        f"conversations or of OpenAI requests, and {RANDOM_IDS}. The tiny pair has its own prompts",
    )
    parser.add_argument("--tp", nargs="+", type=positive, default=[1])
    parser.add_argument("--block-sizes", nargs="+", type=positive, default=[None], help="default: the drafter's")
    parser.add_argument(
        "--draft-windows",
        nargs="+",
        type=number_or_none,
        default=[None],
        help="context tokens that drafters see; none: all of them",
    )
    parser.add_argument(
        "--trees", nargs="+", type=number_or_none, default=[None], help="nodes of draft trees; none: chains"
    )
    parser.add_argument("--measure", choices=list(_METHODS), default="requests")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument(
        "--requests",
        nargs="+",
        type=positive,
        help="answers per run of --measure requests or serving, one number or one for each of --concurrency; default: "
        "4 per client, and at least 16",
    )
    parser.add_argument(
        "--plain-requests", nargs="+", type=positive, help="--requests without speculation; default: as many"
    )
    parser.add_argument("--new-tokens", type=positive, default=128)
    parser.add_argument("--temperatures", nargs="+", type=temperature, default=[0.0], help="for --measure requests")
    parser.add_argument("--plain-tokens", type=positive, default=96, help="for --measure decode: without speculation")
    parser.add_argument(
        "--engine-arguments",
        type=json_object,
        default={},
        help='JSON object of arguments for every engine; {"disable_prefill_cuda_graph": false} restores SGLang\'s CUDA '
        "graphs of prefills, which take a while to capture",
    )
    serving = parser.add_argument_group("--measure serving")
    serving.add_argument("--api", choices=APIS, default=APIS[0], help="bench_serving's --backend")
    serving.add_argument(
        "--request-rates", nargs="+", type=rate, default=[None], help="arrivals per second; inf: when a client is free"
    )
    serving.add_argument(
        "--context-tokens", type=positive, default=2048, help="leave out longer prompts with answers of a dataset"
    )
    serving.add_argument(
        "--default-flags",
        action="store_true",
        help="servers that have default flags and --engine-arguments, one after the other",
    )
    serving.add_argument(
        "--vllm-python", help="for --modes vllm: interpreter of an environment with vLLM; needs --default-flags"
    )
    serving.add_argument("--own-lengths", action="store_true", help="answers as long as those of the dataset")
    parser.add_argument(
        "--accept-length", type=float, help="to simulate; default: 6.5 for qwen3-8b, 5 for qwen3.5, 4 for small"
    )
    parser.add_argument(
        "--recorded-drafts",
        type=Path,
        help="simulate the pair whose drafts this file has (`train_pair.py --stage record`); the in-tree worker gets "
        "the acceptance length of its chains",
    )
    parser.add_argument(
        "--adaptive",
        nargs="*",
        type=yes_or_no,
        default=[False],
        help="adapt the draft length; `no yes` measures both",
    )
    parser.add_argument("--chat-arguments", type=json_object, default={}, help="JSON object for the chat template")
    parser.add_argument(
        "--together", type=positive, help="engines that run at a time; default: what 80 GB hold of an 8B model"
    )
    parser.add_argument("--device", choices=list(_BACKENDS), default=device)
    parser.add_argument("--models", type=Path, default=Path("/tmp/dflash-dummy-models"), help="for dummy weights")
    parser.add_argument("--logs", type=Path, help="folder for the logs of engines and servers; default: none are kept")
    parser.add_argument("--out", type=Path, default=Path("work/bench_sweep"), help="without suffix")
    parser.add_argument("--no-chart", action="store_true", help="if matplotlib is not installed")
    parser.add_argument("--report", action="store_true", help="only write OUT.md and OUT.png from OUT.json")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ValueError: a flag cannot be used. The message names it. For other errors argparse exits.
    """
    args = make_parser().parse_args(argv)
    args.modes = args.modes or (
        ["none", "ours"] if args.device == "cpu" else [mode for mode in MODES if mode != "vllm"]
    )
    defaults = make_parser().parse_args([])
    for name in _SERVING_FLAGS:
        if args.measure != "serving" and getattr(args, name) != getattr(defaults, name):
            raise ValueError(f"--{name.replace('_', '-')}: only for --measure serving.")
    if args.default_flags:
        for name in ("backends", "trees", "adaptive", "block_sizes", "draft_windows", "together"):
            if getattr(args, name) != getattr(defaults, name):
                raise ValueError(f"--{name.replace('_', '-')}: not with --default-flags; leave it out.")
        args.backends, args.together = ["default"], 1
    args.backends = args.backends or _BACKENDS[args.device]
    for name in ("requests", "plain_requests"):
        setattr(args, name, per_concurrency(name, getattr(args, name), args.concurrency))
    args.concurrency = sorted(args.concurrency)
    if args.recorded_drafts is not None:
        if args.accept_length is not None:
            raise ValueError("--accept-length: --recorded-drafts have a length of their own; leave it out.")
        if args.temperatures != [0.0]:
            raise ValueError("--temperatures: --recorded-drafts are of greedy answers; leave it out.")
        if not args.recorded_drafts.is_file():
            raise ValueError(f"--recorded-drafts {args.recorded_drafts}: no such file.")
    if args.temperatures != [0.0] and args.measure != "requests":
        raise ValueError("--temperatures: only for --measure requests.")
    for name in args.engine_arguments:
        if name in OWN_ARGUMENTS:
            raise ValueError(f"--engine-arguments: {name} is set by the sweep itself; leave it out.")
    check_vllm(args)
    if args.device == "cpu" and "in-tree" in args.modes:
        raise ValueError("--modes in-tree: SGLang's own DFLASH does not run on a CPU; leave it out.")
    if not args.no_chart and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("matplotlib is not installed: use --no-chart, and --report on a machine that has it.")
    return args


def check_vllm(args: argparse.Namespace) -> None:
    """Check the flags of `--modes vllm`.

    Raises:
        ValueError: one is missing, or is for SGLang alone. The message names it.
    """
    if ("vllm" in args.modes) != (args.vllm_python is not None):
        raise ValueError("--vllm-python and --modes vllm: each needs the other.")
    if args.vllm_python is None:
        return
    if not args.default_flags:
        raise ValueError("--modes vllm: SGLang's flags are not vLLM's; use --default-flags.")
    if args.engine_arguments:
        raise ValueError("--engine-arguments: not with --modes vllm, which knows none of SGLang's; leave it out.")


def per_concurrency(name: str, numbers: list[int] | None, concurrency: list[int]) -> list[int] | None:
    """Return the numbers of a flag, one for each concurrency from the least on."""
    if numbers is None:
        return None
    if len(numbers) not in (1, len(concurrency)):
        raise ValueError(
            f"--{name.replace('_', '-')}: {len(numbers)} numbers for {len(concurrency)} of --concurrency; give one, or "
            "one for each."
        )
    numbers = numbers * len(concurrency) if len(numbers) == 1 else numbers
    return [number for _, number in sorted(zip(concurrency, numbers, strict=True))]


def main() -> None:
    try:
        args = parse(sys.argv[1:])
        data = Path(f"{args.out}.json")
        if args.report:
            results = Results.load(data)
        else:
            groups = plan(args)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            results = Results(data, describe_setup(args))
    except (OSError, ValueError) as error:
        sys.exit(f"bench_sweep.py: {error}")
    # SIGTERM must also end the engines, in `finally` clauses.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if not args.report:
            run(groups, args, results)
    finally:
        if results.runs:
            write_report(results, args.out, chart=not args.no_chart)


if __name__ == "__main__":
    main()
