"""Evaluation stage on held-out prompts, and report stage: loss curves, summary, and the pair as one archive."""

import json
import tarfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from support.oracle.decode import context_features, dflash_generate, greedy_generate, new_cache
from support.oracle.drafter import ReferenceDrafter
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from models.tiny import load_prompts
from training.blocks import after_anchors, draft_blocks
from training.cycle_tables import tables
from training.cycles import (
    SAMPLINGS,
    DraftKind,
    Draws,
    Sampling,
    draft_kinds,
    gains,
    num_correct,
    pair_vectors,
    ratio,
    walk,
)
from training.files import plot_losses, read_json, write_json
from training.tiny.settings import Settings

TITLES = {"target": "Target: next-token loss", "drafter": "Drafter: position-weighted loss of rows 1..15"}

# Nodes of trees.
TREES = (8, 16, 32)


def run_evaluation(settings: Settings) -> None:
    """Write `work/eval.json`: acceptance lengths of the written pair in float32.

    Stop tokens are ignored, so that every prompt gives `eval_tokens` tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(settings.target_dir)
    target = AutoModelForCausalLM.from_pretrained(settings.target_dir, dtype=torch.float32)
    target = target.to(settings.device).eval()
    drafter = ReferenceDrafter.from_pretrained(settings.drafter_dir, torch.float32).to(settings.device)
    prompts = load_prompts(settings.prompts_dir)[: settings.eval_prompts]
    encoded = [tokenizer(prompt).input_ids for prompt in prompts]

    of_prompts, samples, num_exact = [], [], 0
    for index, prompt in enumerate(tqdm(prompts, desc="eval", mininterval=5)):
        input_ids = torch.tensor(encoded[index])
        output = dflash_generate(target, drafter, input_ids, settings.eval_tokens)
        of_prompts.append(output.accept_lengths)
        if index < settings.exact_prompts:
            num_exact += output.tokens == greedy_generate(target, input_ids, settings.eval_tokens)
            samples.append({"prompt": prompt, "output": tokenizer.decode(output.tokens)})

    flat = [length for lengths in of_prompts for length in lengths]
    result = {
        "num_prompts": len(prompts),
        "num_cycles": len(flat),
        "accept_length": round(sum(flat) / len(flat), 3),
        "accept_length_histogram": dict(sorted(Counter(flat).items())),
        "accept_length_per_prompt": [round(sum(lengths) / len(lengths), 2) for lengths in of_prompts],
        "exact_against_greedy": f"{num_exact} of {min(settings.exact_prompts, len(prompts))}",
        "tokens_per_cycle": {s.name: measure_cycles(target, drafter, encoded, s, settings) for s in SAMPLINGS},
        "samples": samples,
    }
    write_json(settings.work / "eval.json", result)
    kind = "code of held-out modules"
    (settings.work / "eval.md").write_text(tables({kind: result["tokens_per_cycle"]}), encoding="utf-8")
    print(f"eval: accept length {result['accept_length']} over {len(flat)} cycles of {len(prompts)} prompts")
    for name, of_sampling in result["tokens_per_cycle"].items():
        print(f"eval: tokens per cycle, {name}: {of_sampling['of_kinds']}")


@torch.no_grad()
def measure_cycles(
    target: PreTrainedModel,
    drafter: ReferenceDrafter,
    prompts: list[list[int]],
    sampling: Sampling,
    settings: Settings,
) -> dict[str, dict]:
    """Return tokens per cycle over texts of `eval_tokens` tokens, and their standard errors over prompts.

    "of_kinds" has them by ways to draft, and "gains" what noise, copies and more candidates give.
    """
    kinds = draft_kinds(TREES, sampling.temperature > 0)
    keys = torch.randint(2**62, (len(prompts),), generator=torch.Generator().manual_seed(settings.seed))
    draws = sampling.draws(keys.to(target.device))
    texts = write_texts(target, prompts, settings.eval_tokens, draws)
    cycles = []
    for i, (prompt, text) in enumerate(zip(tqdm(prompts, desc=sampling.name, mininterval=5), texts, strict=True)):
        own = draws.take(torch.tensor([i], device=target.device))
        cycles.append([len(of_kind) for of_kind in cycles_of(target, drafter, prompt, text, own, kinds)])
    num_decoded = torch.full((len(prompts),), settings.eval_tokens - 1, dtype=torch.float64)
    names = [kind.name for kind in kinds]
    of_kinds = dict(zip(names, torch.tensor(cycles, dtype=torch.float64).T, strict=True))
    return {
        "of_kinds": {name: ratio(num_decoded, of_kind) for name, of_kind in of_kinds.items()},
        "gains": gains(of_kinds, kinds),
    }


@torch.no_grad()
def cycles_of(
    target: PreTrainedModel,
    drafter: ReferenceDrafter,
    prompt: list[int],
    text: list[int],
    draws: Draws,
    kinds: Sequence[DraftKind],
) -> list[list[int]]:
    """Return the tokens that each cycle commits over a text that the target wrote after a prompt, of each kind.

    Args:
        draws: how the target chose the text's tokens.
    """
    block_size, tokens = drafter.config.block_size, torch.tensor([prompt + text], device=target.device)
    states = target(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states
    anchors = torch.arange(len(prompt), tokens.shape[1], device=target.device)[None]
    hidden = draft_blocks(
        drafter, target.get_input_embeddings().weight, context_features(states, drafter), tokens, anchors
    )
    logits = F.linear(hidden[0], target.get_output_embeddings().weight)
    labels = after_anchors(F.pad(tokens, (0, block_size), value=-1), anchors, block_size)[0]
    texts, of_blocks = tokens.expand(len(text), -1), draws.take(torch.zeros_like(anchors[0]))
    vectors = pair_vectors(drafter, hidden[0])
    correct = num_correct(logits, labels, texts, anchors[0] + 1, of_blocks, kinds, vectors)
    return [walk(len(text), of_kind.tolist()) for of_kind in correct]


def write_texts(target: PreTrainedModel, prompts: list[list[int]], num_tokens: int, draws: Draws) -> list[list[int]]:
    """Return the texts that the target writes alone after the prompts.

    All rows advance together from the end of the shortest prompt, and read the tokens of longer ones.
    """
    shortest, longest = min(map(len, prompts)), max(map(len, prompts))
    given = torch.full((len(prompts), longest + num_tokens), -1, device=target.device)
    for row, prompt in zip(given, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, device=target.device)
    tokens, cache = given[:, :shortest], new_cache(target)
    step_ids = tokens
    while tokens.shape[1] < longest + num_tokens:
        logits: Tensor = target(input_ids=step_ids, past_key_values=cache, use_cache=True).logits[:, -1]
        last = torch.full((len(prompts),), tokens.shape[1] - 1, device=target.device)
        known = given[:, tokens.shape[1]]
        step_ids = torch.where(known < 0, draws.choose(logits, last), known)[:, None]
        tokens = torch.cat([tokens, step_ids], dim=1)
    return [row[len(prompt) : len(prompt) + num_tokens].tolist() for row, prompt in zip(tokens, prompts, strict=True)]


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
    """Return the number of weights in `model.safetensors`."""
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        return sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118  (not a dict)
