"""Eval stage: committed tokens per cycle, on prompts of several kinds, greedy and sampled.

A draft is accepted if the target chooses the same token. So the text that the target writes alone determines what every
cycle would have committed. One forward drafts a block at each token of the text, and the cycles are then followed from
block to block.
"""

import math
from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from support.oracle.drafter import ReferenceDrafter
from torch import Tensor

from training import processes
from training.blocks import after_anchors, draft_blocks
from training.cycle_tables import tables
from training.cycles import (
    CHAIN,
    SAMPLINGS,
    Sampling,
    draft_kinds,
    gains,
    num_correct,
    pair_vectors,
    ratio,
    walk,
)
from training.files import read_json, write_json
from training.smollm2.conversations import load_tokenizer
from training.smollm2.decoder import Rows, run_steps
from training.smollm2.llama import Llama, head_logits
from training.smollm2.prompts import has_conversations, make_prompts
from training.smollm2.settings import TURN_END_ID, Settings

# Sequences that are drafted in one forward.
BATCH = 4
TOP = (1, 2, 4, 8)
# Nodes of trees, and blocks that are drafted together.
TREES, BLOCK_BATCH = (8, 16, 32, 64), 256
# Kinds of prompts that are also taken together.
ORDINARY = ("chat", "code", "maths")


def run(settings: Settings) -> None:
    """Write `report/eval.json` and `report/eval.md` after each kind of prompts.

    A run of a pair with prompts of its own writes `out/prompts.json` if it has conversations. Other runs evaluate the
    prompts that are there, and those of `quoting_prompts.json`, whose answers repeat parts of the prompt.
    """
    tokenizer = load_tokenizer(settings)
    llama = Llama(settings.target_dir, settings.device)
    drafters = {
        name: ReferenceDrafter.from_pretrained(folder).to(settings.device) for name, folder in settings.drafters.items()
    }
    torch.manual_seed(settings.seed * 64 + processes.rank())
    if processes.rank() == 0:
        if settings.prompts_dir == settings.out and has_conversations(settings):
            prompts = make_prompts(tokenizer, settings)
            shipped = {kind: texts for kind, texts in prompts.items() if kind != "long"}
            write_json(settings.out / "prompts.json", shipped)
        else:
            names = ("prompts.json", "quoting_prompts.json")
            kinds = {kind: texts for name in names for kind, texts in read_json(settings.prompts_dir / name).items()}
            prompts = {kind: texts[: settings.eval_prompts] for kind, texts in kinds.items()}
            # An evaluation that is cut short has the kinds of few prompts.
            prompts = dict(sorted(prompts.items(), key=lambda item: len(item[1])))
        write_json(settings.work / "eval_prompts.json", prompts)
    processes.wait()

    results, ordinary = {}, []
    for kind, texts in read_json(settings.work / "eval_prompts.json").items():
        # With few conversations, no held-out one may be a prompt.
        if not texts:
            continue
        messages = [[{"role": "user", "content": text}] for text in texts]
        chats = [tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in messages]
        prompts = sorted((tokenizer.encode(chat) for chat in chats), key=len)
        share = math.ceil(len(prompts) / processes.count())
        mine = prompts[processes.rank() * share :][:share]
        measured = processes.gather(measure(llama, drafters, mine, settings) if mine else {})
        measured = [part for part in measured if part]
        results[kind] = summarize_all(measured, list(drafters))
        if kind in ORDINARY:
            ordinary += measured
            if len(ordinary) > len(measured):
                results[" and ".join(ORDINARY)] = summarize_all(ordinary, list(drafters))
        if processes.rank() == 0:
            write_json(settings.report / "eval.json", results)
            (settings.report / "eval.md").write_text(tables(results), encoding="utf-8")
            lengths = {name: result["tokens_per_cycle"] for name, result in results[kind].items()}
            print(f"eval of {len(prompts)} {kind} prompts: {lengths}", flush=True)


@dataclass
class Measured:
    """Measurements of some prompts.

    Attributes:
        tokens: per prompt.
        cycles: per prompt, of each way to draft.
        lengths: number of cycles of chains by the tokens that they committed.
        hits: [len(TOP), W - 1]. Times that the right token was among the first `TOP` candidates, per depth.
        num: [W - 1]. Labels per depth.
    """

    tokens: list[int]
    cycles: list[list[int]]
    lengths: Counter
    hits: Tensor
    num: Tensor


def measure(
    llama: Llama, drafters: dict[str, ReferenceDrafter], prompts: list[list[int]], settings: Settings
) -> dict[str, dict[str, Measured]]:
    """Continue every prompt with every sampling, and draft at each token. Returned by sampling, then by drafter."""
    rows, firsts, keys = continue_prompts(llama, prompts, settings)
    found = {}
    for i, sampling in enumerate(SAMPLINGS):
        of_sampling = slice(i * len(prompts), (i + 1) * len(prompts))
        found[sampling.name] = {}
        for name, drafter in drafters.items():
            depths = drafter.config.block_size - 1
            of_drafter = Measured([], [], Counter(), torch.zeros(len(TOP), depths), torch.zeros(depths))
            found[sampling.name][name] = of_drafter
            for tokens, first, part_keys in zip(
                *(values[of_sampling].split(BATCH) for values in (rows, firsts, keys)), strict=True
            ):
                measure_batch(llama, drafter, tokens, first, settings.eval_tokens, sampling, part_keys, of_drafter)
    return found


def continue_prompts(llama: Llama, prompts: list[list[int]], settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens [samplings * prompts, length] int64, the first generated position of each row, and its key."""
    longest, shortest = max(map(len, prompts)), min(map(len, prompts))
    num_prompts = len(prompts)
    rows = Rows(llama, len(SAMPLINGS) * num_prompts, longest + settings.eval_tokens)
    for i, prompt in enumerate(prompts):
        rows.tokens[i::num_prompts, : len(prompt)] = torch.tensor(prompt, device=llama.device)
        rows.given[i::num_prompts, : len(prompt)] = True
    firsts = torch.tensor([len(prompt) for prompt in prompts], device=llama.device).repeat(len(SAMPLINGS))
    keys = torch.randint(2**62, (len(SAMPLINGS) * num_prompts,), device=llama.device)
    draws = [sampling.draws(own) for sampling, own in zip(SAMPLINGS, keys.split(num_prompts), strict=True)]

    def choose(logits: Tensor) -> Tensor:
        # The step has moved to the position that is decided.
        last = (rows.position - 1).expand(num_prompts)
        parts = zip(draws, logits.split(num_prompts), strict=True)
        return torch.cat([of_sampling.choose(part, last) for of_sampling, part in parts])

    rows.start(shortest)
    run_steps(lambda: rows.step(choose), longest + settings.eval_tokens - shortest, "continue")
    return rows.tokens, firsts, keys


@torch.no_grad()
def measure_batch(
    llama: Llama,
    drafter: ReferenceDrafter,
    tokens: Tensor,
    first: Tensor,
    num_tokens: int,
    sampling: Sampling,
    keys: Tensor,
    found: Measured,
) -> None:
    """Draft at each of `num_tokens` generated tokens of tokens [bs, T], from position `first` [bs] on.

    Args:
        sampling, keys: how the tokens were drawn; keys are [bs] int64.
        found: is added to.
    """
    block_size, kinds = drafter.config.block_size, draft_kinds(TREES, sampling.temperature > 0)
    anchors = first[:, None] + torch.arange(num_tokens, device=tokens.device)
    features = llama.features(tokens, drafter.config.target_layer_ids)
    # The last blocks extend past the text.
    labels = after_anchors(F.pad(tokens, (0, block_size)), anchors, block_size)
    hidden = draft_blocks(drafter, llama.embedding, features, tokens, anchors.clamp(max=tokens.shape[1] - 1))
    logits = head_logits(hidden.to(llama.embedding.dtype).flatten(0, -2), llama.embedding).view(*labels.shape, -1)
    ranks = (logits > logits.gather(-1, labels[..., None])).sum(-1)

    # The text ends with the turn.
    generated = tokens.gather(1, anchors)
    is_end = generated == TURN_END_ID
    lengths = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, num_tokens)
    depths = torch.arange(1, block_size, device=tokens.device)
    counts = torch.arange(num_tokens, device=tokens.device)[:, None] + depths < lengths[:, None, None]
    own_labels = labels.masked_fill(~counts, -1).flatten(0, 1)
    texts = torch.arange(len(tokens), device=tokens.device).repeat_interleave(num_tokens)
    blocks = (hidden.flatten(0, 1), logits.flatten(0, 1), own_labels, texts, (anchors + 1).flatten())
    parts = zip(*(rows.split(BLOCK_BATCH) for rows in blocks), strict=True)
    correct_in_blocks = torch.cat(
        [
            num_correct(
                of_part, wanted, tokens[text], lens, sampling.draws(keys[text]), kinds, pair_vectors(drafter, states)
            )
            for states, of_part, wanted, text, lens in parts
        ],
        dim=1,
    ).view(len(kinds), *anchors.shape)
    found.num += counts.sum((0, 1)).cpu()
    for i, top in enumerate(TOP):
        found.hits[i] += ((ranks < top) & counts).sum((0, 1)).cpu()
    for length, *correct in zip(lengths.tolist(), *correct_in_blocks.tolist(), strict=True):
        if length < 2:
            continue
        found.tokens.append(length - 1)
        committed = [walk(length, of_kind) for of_kind in correct]
        found.cycles.append([len(of_kind) for of_kind in committed])
        found.lengths.update(committed[kinds.index(CHAIN)])


def summarize_all(parts: list[dict[str, dict[str, Measured]]], drafters: list[str]) -> dict[str, dict]:
    """Return the measurements of all processes by sampling: of the pair's drafter, and what it gives over others."""
    results = {}
    for sampling in SAMPLINGS:
        own, *others = ([part[sampling.name][name] for part in parts] for name in drafters)
        results[sampling.name] = summarize(own, sampling)
        cycles = cycles_by_kind(own, sampling)
        for name, other in zip(drafters[1:], others, strict=True):
            of_other = cycles_by_kind(other, sampling)
            over = {kind: list(ratio(of_other[kind], cycles[kind])) for kind in cycles}
            results[sampling.name][name] = summarize(other, sampling)
            results[sampling.name][f"over_{name}"] = over
    return results


def cycles_by_kind(parts: list[Measured], sampling: Sampling) -> dict[str, Tensor]:
    """Return the cycles of each prompt, [prompts] float64, by the names of ways to draft."""
    kinds = draft_kinds(TREES, sampling.temperature > 0)
    cycles = torch.tensor([n for part in parts for n in part.cycles], dtype=torch.float64)
    return dict(zip((kind.name for kind in kinds), cycles.T, strict=True))


def summarize(parts: list[Measured], sampling: Sampling) -> dict:
    """Return tokens per cycle with the standard error over prompts, and the other measurements of all processes."""
    kinds = draft_kinds(TREES, sampling.temperature > 0)
    tokens = torch.tensor([n for part in parts for n in part.tokens], dtype=torch.float64)
    of_kinds = cycles_by_kind(parts, sampling)
    mean, error = ratio(tokens, of_kinds[CHAIN.name])
    hits, num = sum(part.hits for part in parts), sum(part.num for part in parts)
    return {
        "prompts": len(tokens),
        "tokens": int(tokens.sum()),
        "cycles": int(of_kinds[CHAIN.name].sum()),
        "tokens_per_cycle": mean,
        "standard_error": error,
        "tokens_of_prompts": tokens.long().tolist(),
        "cycles_of_prompts": {name: of_kind.long().tolist() for name, of_kind in of_kinds.items()},
        "of_kinds": {name: list(ratio(tokens, of_kind)) for name, of_kind in of_kinds.items()},
        "gains": gains(of_kinds, kinds),
        "cycles_that_commit": dict(sorted(sum((part.lengths for part in parts), Counter()).items())),
        "right_token_in_first": {
            str(top): [round(share, 3) for share in (of_top / num.clamp(min=1)).tolist()]
            for top, of_top in zip(TOP, hits, strict=True)
        },
    }
