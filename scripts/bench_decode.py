"""Decode throughput of no speculation, SGLang's in-tree DFLASH and this package, in one run on one GPU.

    python3 scripts/bench_decode.py --out scripts/results/qwen3-8b_h100.md

Models have dummy weights in the shape of real ones, so acceptance is simulated (`SGLANG_SIMULATE_ACC_LEN`). Every
configuration gets an Engine of its own process; every figure is a median over repeats inside it, with the spread.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

MODES = ("none", "in-tree", "ours")

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_8B_DFLASH = QWEN3_8B | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "layer_types": ["full_attention"] * 5,
    "max_window_layers": 5,
    "num_hidden_layers": 5,
    "num_target_layers": 36,
}
# A pair whose GPU work is negligible: what is left is the overhead of a cycle.
_SMALL = {
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_WINDOWED = {
    "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    "sliding_window": 128,
    "use_sliding_window": True,
    "num_hidden_layers": 3,
    "num_target_layers": 6,
    "dflash_config": {"mask_token_id": 4095, "target_layer_ids": [1, 2, 3]},
}
PAIRS = {
    "qwen3-8b": (QWEN3_8B, QWEN3_8B_DFLASH),
    "qwen3-8b-swa": (
        QWEN3_8B,
        QWEN3_8B_DFLASH
        | {
            "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
            "sliding_window": 2048,
            "use_sliding_window": True,
        },
    ),
    "small": (QWEN3_8B | _SMALL | {"num_hidden_layers": 6}, QWEN3_8B_DFLASH | _SMALL | _WINDOWED),
}


def write_pair(name: str, folder: Path) -> tuple[Path, Path]:
    """Config-only checkpoints; `--load-format dummy` fills in the weights."""
    paths = folder / name / "target", folder / name / "drafter"
    for path, config in zip(paths, PAIRS[name], strict=True):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
    return paths


def measure(args: argparse.Namespace) -> None:
    """One configuration, in this process; prints one JSON line for every batch size."""
    import sglang

    target, drafter = write_pair(args.pair, args.models)
    dflash = {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(drafter)}
    engine = sglang.Engine(
        model_path=str(target),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        attention_backend=args.backend,
        mem_fraction_static=0.75,
        disable_radix_cache=True,
        max_running_requests=max(64, *args.batch),
        cuda_graph_bs_decode=args.batch,
        disable_prefill_cuda_graph=True,
        random_seed=1,
        log_level="warning",
        **({} if args.mode == "none" else dflash),
    )
    served_by = engine.get_server_info()["internal_states"][0].get("sglang_dflash")
    assert (served_by is not None) == (args.mode == "ours"), f"{args.mode} is served by {served_by}"
    rng = random.Random(0)
    for batch in args.batch:
        prompts = [[rng.randrange(100, 4000) for _ in range(args.prompt_tokens)] for _ in range(batch)]
        print("RESULT " + json.dumps(measure_batch(engine, prompts, args)), flush=True)
    engine.shutdown()


def measure_batch(engine, prompts: list[list[int]], args: argparse.Namespace) -> dict:
    def run(new_tokens: int) -> tuple[float, list[dict]]:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        start = time.perf_counter()
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
        return time.perf_counter() - start, outputs

    run(64)
    prefill = statistics.median(run(1)[0] for _ in range(3))
    rates, cycles, accept_length = [], [], 1.0
    for _ in range(args.repeats):
        seconds, outputs = run(args.new_tokens + 1)
        meta = outputs[0]["meta_info"]
        num_cycles = meta.get("spec_verify_ct") or args.new_tokens
        accept_length = args.new_tokens / num_cycles
        rates.append(len(prompts) * args.new_tokens / (seconds - prefill))
        cycles.append((seconds - prefill) / num_cycles * 1e3)
    return {
        "pair": args.pair,
        "mode": args.mode,
        "backend": args.backend,
        "batch": len(prompts),
        "tokens_per_s": [round(rate, 1) for rate in rates],
        "cycle_ms": [round(cycle, 3) for cycle in cycles],
        "prefill_s": round(prefill, 4),
        "accept_length": round(accept_length, 3),
    }


def run_all(args: argparse.Namespace) -> list[dict]:
    results = []
    for backend in args.backends:
        for mode in args.modes:
            command = [sys.executable, __file__, "--measure", "--mode", mode, "--backend", backend, "--pair", args.pair]
            command += ["--batch", *map(str, args.batch), "--models", str(args.models)]
            command += ["--repeats", str(args.repeats), "--new-tokens", str(args.new_tokens)]
            command += ["--prompt-tokens", str(args.prompt_tokens)]
            env = dict(os.environ, SGLANG_SIMULATE_ACC_LEN=str(args.accept_length) if mode != "none" else "-1")
            if mode == "in-tree":
                env["SGLANG_PLUGINS"] = "none"
            run = subprocess.run(command, env=env, capture_output=True, text=True)
            lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
            if run.returncode or len(lines) != len(args.batch):
                raise RuntimeError(f"{mode} on {backend} failed:\n{run.stderr[-6000:]}")
            for line in lines:
                results.append(json.loads(line.removeprefix("RESULT ")))
                print(line, flush=True)
    return results


def report(results: list[dict], args: argparse.Namespace) -> str:
    import torch

    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("sglang", "sglang-dflash", "torch", "flashinfer-python")
    )
    lines = [
        f"# Decode throughput, {args.pair} shape, dummy weights",
        "",
        f"{torch.cuda.get_device_name()}; {versions}; {date.today()}.",
        f"`python3 scripts/bench_decode.py {' '.join(sys.argv[1:])}`",
        f"{args.prompt_tokens}-token prompts, {args.new_tokens} new tokens, greedy, simulated acceptance length "
        f"{args.accept_length}, {args.repeats} repeats: median (min to max). Which worker serves is asserted through "
        "`/server_info`.",
        "",
        "| backend | batch | "
        + " | ".join(f"{mode} tok/s" for mode in args.modes)
        + " | ms per cycle | ours / in-tree |",
        "|---|---|" + "---|" * (len(args.modes) + 2),
    ]
    by_key = {(r["backend"], r["batch"], r["mode"]): r for r in results}
    for backend in args.backends:
        for batch in args.batch:
            rows = {mode: by_key[backend, batch, mode] for mode in args.modes}
            rates = {mode: statistics.median(row["tokens_per_s"]) for mode, row in rows.items()}
            cells = [
                f"{rates[mode]:.0f} ({min(row['tokens_per_s']):.0f} to {max(row['tokens_per_s']):.0f})"
                for mode, row in rows.items()
            ]
            cycles = " / ".join(f"{statistics.median(row['cycle_ms']):.2f}" for row in rows.values())
            ratio = f"{rates['ours'] / rates['in-tree']:.3f}" if {"ours", "in-tree"} <= set(rates) else "-"
            lines.append(f"| {backend} | {batch} | " + " | ".join(cells) + f" | {cycles} | {ratio} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=PAIRS, default="qwen3-8b")
    parser.add_argument("--backends", nargs="+", default=["fa3", "flashinfer"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--accept-length", type=float, default=6.5)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=384)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", type=Path, default=Path("/tmp/dflash-dummy-models"))
    parser.add_argument("--out", type=Path, help="Markdown report; raw numbers go beside it as .json")
    parser.add_argument("--measure", action="store_true", help="measure one configuration in this process")
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--backend")
    args = parser.parse_args()
    if args.measure:
        measure(args)
        return
    results = run_all(args)
    text = report(results, args)
    print(text)
    if args.out:
        args.out.write_text(text)
        args.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
