"""Evaluation stage over held-out prompts, and the report: loss curves, summary, the pair as one archive."""

import json
import tarfile
from collections import Counter
from pathlib import Path

import torch
from safetensors import safe_open
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.oracle.decode import dflash_generate, greedy_generate
from sglang_dflash.oracle.drafter import ReferenceDrafter
from sglang_dflash.tiny_pair import load_prompts
from training.files import plot_losses, read_json, write_json
from training.tiny.settings import Settings

TITLES = {"target": "Target: next-token loss", "drafter": "Drafter: position-weighted loss of rows 1..15"}


def run_evaluation(settings: Settings) -> None:
    """Acceptance lengths of the written pair in float32: `work/eval.json`.

    Stop tokens are ignored, so that every prompt gives `eval_tokens` tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(settings.target_dir)
    target = AutoModelForCausalLM.from_pretrained(settings.target_dir, dtype=torch.float32)
    target = target.to(settings.device).eval()
    drafter = ReferenceDrafter.from_pretrained(settings.drafter_dir, torch.float32).to(settings.device)
    prompts = load_prompts(settings.prompts_dir)[: settings.eval_prompts]

    accept_lengths, samples, num_exact = [], [], 0
    for index, prompt in enumerate(tqdm(prompts, desc="eval", mininterval=5)):
        input_ids = torch.tensor(tokenizer(prompt).input_ids)
        output = dflash_generate(target, drafter, input_ids, settings.eval_tokens)
        accept_lengths.append(output.accept_lengths)
        if index < settings.exact_prompts:
            num_exact += output.tokens == greedy_generate(target, input_ids, settings.eval_tokens)
            samples.append({"prompt": prompt, "output": tokenizer.decode(output.tokens)})

    flat = [length for lengths in accept_lengths for length in lengths]
    result = {
        "num_prompts": len(prompts),
        "num_cycles": len(flat),
        "accept_length": round(sum(flat) / len(flat), 3),
        "accept_length_histogram": dict(sorted(Counter(flat).items())),
        "accept_length_per_prompt": [round(sum(lengths) / len(lengths), 2) for lengths in accept_lengths],
        "exact_against_greedy": f"{num_exact} of {min(settings.exact_prompts, len(prompts))}",
        "samples": samples,
    }
    write_json(settings.work / "eval.json", result)
    print(f"eval: accept length {result['accept_length']} over {len(flat)} cycles of {len(prompts)} prompts")


def run_report(settings: Settings) -> None:
    """Write `summary.json`, `losses.json`, `losses.png` and `pair.tar` to the report folder."""
    settings.report.mkdir(parents=True, exist_ok=True)
    files = sorted(path for path in settings.out.rglob("*") if path.suffix in {".json", ".safetensors"})
    num_bytes = sum(path.stat().st_size for path in files)
    assert num_bytes <= settings.max_bytes, f"the pair takes {num_bytes:,} bytes, more than {settings.max_bytes:,}"

    losses = {name: read_json(settings.work / f"{name}_losses.json") for name in TITLES}
    summary = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if settings.device == "cuda" else "cpu",
        "seed": settings.seed,
        "target_parameters": count_parameters(settings.target_dir),
        "drafter_parameters": count_parameters(settings.drafter_dir),
        "bytes": num_bytes,
        "target_held_out": losses["target"]["held_out"][-1][1],
        "drafter_held_out": losses["drafter"]["held_out"][-1][1],
        "seconds": {name: loss["seconds"] for name, loss in losses.items()},
        "eval": read_json(settings.work / "eval.json"),
    }
    write_json(settings.report / "summary.json", summary)
    write_json(settings.report / "losses.json", losses)
    plot_losses(losses, TITLES, settings.report / "losses.png")
    with tarfile.open(settings.report / "pair.tar", "w") as archive:
        for path in files:
            archive.add(path, path.relative_to(settings.out))
    print(json.dumps({key: value for key, value in summary.items() if key != "eval"}, indent=2))
    print(json.dumps({key: value for key, value in summary["eval"].items() if key != "samples"}))
    assert summary["eval"]["accept_length"] >= settings.min_accept_length, "the acceptance length is too low"


def count_parameters(folder: Path) -> int:
    """Number of weights in `model.safetensors`."""
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        return sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118  (not a dict)
