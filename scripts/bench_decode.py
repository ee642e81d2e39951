"""Decode throughput of no speculation, SGLang's in-tree DFLASH and this package, in one run on one GPU.

    python3 scripts/bench_decode.py --out scripts/results/qwen3-8b_h100.md

Models have dummy weights in the shape of real ones, so acceptance is simulated (`SGLANG_SIMULATE_ACC_LEN`). Every
configuration is an Engine in its own process; those that are compared take turns. Every figure is a median over
repeats, with the spread.
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
import tempfile
import time
from datetime import date
from pathlib import Path

MODES = ("none", "in-tree", "ours")

# Length of the short answer that a long one is compared with.
WARM_TOKENS = 64

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


def engine_arguments(args: argparse.Namespace) -> dict:
    """Engine arguments of one configuration: `args.mode`, `args.backend`, `args.pair`, graphs for `args.batch`."""
    target, drafter = write_pair(args.pair, args.models)
    dflash = {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(drafter)}
    return {
        "model_path": str(target),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "attention_backend": args.backend,
        "disable_radix_cache": True,
        "max_running_requests": max(64, *args.batch),
        "cuda_graph_bs_decode": args.batch,
        "disable_prefill_cuda_graph": True,
        "random_seed": 1,
        "log_level": "warning",
    } | ({} if args.mode == "none" else dflash)


def mode_environment(mode: str, accept_length: float) -> dict[str, str]:
    """Environment of a process that serves `mode`: in-tree keeps every plugin out, "none" accepts nothing."""
    env = os.environ | {"SGLANG_SIMULATE_ACC_LEN": "-1" if mode == "none" else str(accept_length)}
    return env | {"SGLANG_PLUGINS": "none"} if mode == "in-tree" else env


def check_worker(engine, mode: str) -> None:
    served_by = engine.get_server_info()["internal_states"][0].get("sglang_dflash")
    assert (served_by is not None) == (mode == "ours"), f"{mode} is served by {served_by}"


def serve(args: argparse.Namespace) -> None:
    """One configuration, in this process: says READY, then measures one batch size for every line on stdin."""
    import sglang

    engine = sglang.Engine(
        **engine_arguments(args),
        # Engines that are compared live on the GPU side by side, so each takes only the KV it needs.
        mem_fraction_static=0.9,
        max_total_tokens=max(args.batch) * (args.prompt_tokens + WARM_TOKENS + args.new_tokens + 128),
    )
    check_worker(engine, args.mode)
    rng = random.Random(0)
    prompts = [[rng.randrange(100, 4000) for _ in range(args.prompt_tokens)] for _ in range(max(args.batch))]
    print("READY", flush=True)
    for line in sys.stdin:
        print("RESULT " + json.dumps(measure(engine, prompts[: int(line)], args.new_tokens)), flush=True)
    engine.shutdown()


def measure(engine, prompts: list[list[int]], new_tokens: int) -> dict:
    """Steady decoding: what a long answer costs more than a short one, so that prefill and the ends cancel."""

    def run(tokens: int) -> tuple[float, int]:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        start = time.perf_counter()
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
        return time.perf_counter() - start, outputs[0]["meta_info"].get("spec_verify_ct") or tokens

    short_seconds, short_cycles = run(WARM_TOKENS)
    seconds, cycles = run(WARM_TOKENS + new_tokens)
    seconds, cycles = seconds - short_seconds, cycles - short_cycles
    return {"tokens_per_s": len(prompts) * new_tokens / seconds, "cycle_ms": seconds / cycles * 1e3, "cycles": cycles}


class Configuration:
    """An Engine in a process of its own."""

    def __init__(self, mode: str, backend: str, args: argparse.Namespace) -> None:
        self.mode, self.backend = mode, backend
        new_tokens = args.new_tokens if mode != "none" else args.plain_tokens
        command = [sys.executable, __file__, "--serve", "--mode", mode, "--backend", backend, "--pair", args.pair]
        command += ["--batch", *map(str, args.batch), "--models", str(args.models)]
        command += ["--new-tokens", str(new_tokens), "--prompt-tokens", str(args.prompt_tokens)]
        env = mode_environment(mode, args.accept_length)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the process)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        self._process = subprocess.Popen(command, env=env, text=True, **pipes)

    def wait_for(self, word: str) -> str:
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        self._log.seek(0)
        raise RuntimeError(f"{self.mode} on {self.backend} failed:\n{self._log.read()[-6000:]}")

    def measure(self, batch: int) -> dict:
        print(batch, file=self._process.stdin, flush=True)
        result = {"mode": self.mode, "backend": self.backend, "batch": batch} | json.loads(self.wait_for("RESULT "))
        print(json.dumps(result), flush=True)
        return result

    def stop(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)


def run_all(args: argparse.Namespace) -> list[dict]:
    """In-tree and ours take turns on the same GPU, so that drift hits both; so do the backends without speculation."""
    groups = [[(mode, backend) for mode in args.modes if mode != "none"] for backend in args.backends]
    if "none" in args.modes:
        groups.append([("none", backend) for backend in args.backends])
    results = []
    for group in groups:
        configurations = [Configuration(mode, backend, args) for mode, backend in group]
        for configuration in configurations:
            configuration.wait_for("READY")
        for batch in args.batch:
            for configuration in configurations:
                configuration.measure(batch)  # warm-up
            for _ in range(args.repeats):
                results += [configuration.measure(batch) for configuration in configurations]
        for configuration in configurations:
            configuration.stop()
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
        f"{args.prompt_tokens}-token prompts, greedy, simulated acceptance length {args.accept_length}, {args.repeats} "
        f"repeats: median (min to max) over {args.new_tokens} tokens of steady decoding ({args.plain_tokens} without "
        "speculation). Compared engines take turns. Which worker serves is asserted through `/server_info`.",
        "",
        "| backend | batch | "
        + " | ".join(f"{mode} tok/s" for mode in args.modes)
        + " | ms per cycle | ours / in-tree |",
        "|---|---|" + "---|" * (len(args.modes) + 2),
    ]
    for backend in args.backends:
        for batch in args.batch:
            rows = {
                mode: [r for r in results if (r["backend"], r["batch"], r["mode"]) == (backend, batch, mode)]
                for mode in args.modes
            }
            rates = {mode: [r["tokens_per_s"] for r in row] for mode, row in rows.items()}
            cells = [f"{statistics.median(r):.0f} ({min(r):.0f} to {max(r):.0f})" for r in rates.values()]
            cycles = " / ".join(f"{statistics.median(r['cycle_ms'] for r in row):.2f}" for row in rows.values())
            ratio = "-"
            if {"ours", "in-tree"} <= set(rates):
                # Turn by turn: both draw the same simulated lengths, and what disturbed one disturbed the other.
                ratios = [ours / in_tree for ours, in_tree in zip(rates["ours"], rates["in-tree"], strict=True)]
                ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            lines.append(f"| {backend} | {batch} | " + " | ".join(cells) + f" | {cycles} | {ratio} |")
    return "\n".join(lines) + "\n"


def save(text: str, results: list[dict], out: Path | None) -> None:
    """Print the report; where `out` is given, write it there and the raw numbers beside it."""
    print(text)
    if out:
        out.write_text(text)
        out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=PAIRS, default="qwen3-8b")
    parser.add_argument("--backends", nargs="+", default=["fa3", "flashinfer"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--accept-length", type=float, default=6.5)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=640)
    parser.add_argument("--plain-tokens", type=int, default=128, help="new tokens without speculation")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", type=Path, default=Path("/tmp/dflash-dummy-models"))
    parser.add_argument("--out", type=Path, help="Markdown report; raw numbers go beside it as .json")
    parser.add_argument("--serve", action="store_true", help="one configuration, in this process")
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--backend")
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return
    results = run_all(args)
    save(report(results, args), results, args.out)


if __name__ == "__main__":
    main()
