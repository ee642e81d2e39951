"""Eval stage: what a cycle commits, on prompts of several kinds, greedy and sampled.

A proposal of one token is accepted if the target draws that very token. So the text that the target writes alone says
what every cycle would have committed: all of it is drafted in one forward, a block at each token, and then the
cycles are walked from block to block.
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
from training.cycles import num_correct_in_trees, ratio, walk
from training.files import read_json, write_json
from training.smollm2.conversations import load_tokenizer
from training.smollm2.decoder import Rows, run_steps, sample
from training.smollm2.llama import Llama, head_logits
from training.smollm2.prompts import make_prompts
from training.smollm2.settings import TURN_END_ID, Settings

# Sequences that are drafted at once.
BATCH = 4
TOP = (1, 2, 4, 8)
# Nodes of trees that have room for a whole block, of so many candidates at each depth; blocks whose trees are grown at
# once.
TREES, CANDIDATES, TREE_BATCH = (16, 32, 64), 8, 256


@dataclass(frozen=True)
class Sampling:
    """How the target chooses; `temperature` 0 is greedy."""

    name: str
    temperature: float
    top_p: float = 1.0
    top_k: int = 0


SAMPLINGS = (
    Sampling("greedy", 0.0),
    Sampling("t0.6_top_p0.95_top_k20", 0.6, 0.95, 20),
    Sampling("t0.7", 0.7),
    Sampling("t1", 1.0),
)


def run(settings: Settings) -> None:
    """Write `out/prompts.json`, and `report/eval.json` anew after each kind of prompts."""
    tokenizer = load_tokenizer(settings)
    llama = Llama(settings.target_dir, settings.device)
    drafter = ReferenceDrafter.from_pretrained(settings.drafter_dir).to(settings.device)
    torch.manual_seed(settings.seed * 64 + processes.rank())
    if processes.rank() == 0:
        prompts = make_prompts(tokenizer, settings)
        write_json(settings.work / "eval_prompts.json", prompts)
        write_json(settings.out / "prompts.json", {kind: texts for kind, texts in prompts.items() if kind != "long"})
    processes.wait()

    results = {}
    for kind, texts in read_json(settings.work / "eval_prompts.json").items():
        # Of few conversations, none may be held out that chats can begin with.
        if not texts:
            continue
        messages = [[{"role": "user", "content": text}] for text in texts]
        chats = [tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in messages]
        prompts = sorted((tokenizer.encode(chat) for chat in chats), key=len)
        share = math.ceil(len(prompts) / processes.count())
        mine = prompts[processes.rank() * share :][:share]
        measured = measure(llama, drafter, mine, settings) if mine else {}
        measured = processes.gather(measured)
        results[kind] = {sampling.name: summarize([m[sampling.name] for m in measured if m]) for sampling in SAMPLINGS}
        if processes.rank() == 0:
            write_json(settings.report / "eval.json", results)
            lengths = {name: result["tokens_per_cycle"] for name, result in results[kind].items()}
            print(f"eval of {len(prompts)} {kind} prompts: {lengths}", flush=True)


@dataclass
class Measured:
    """Of some prompts: tokens and cycles per prompt, how many cycles committed what, and the drafter's ranking.

    `cycles` are of chains and of each size of trees in turn. `hits` [len(TOP), B - 1]: how often the right token was
    among the first so many, at each depth; `num` [B - 1].
    """

    tokens: list[int]
    cycles: list[list[int]]
    lengths: Counter
    hits: Tensor
    num: Tensor


def measure(
    llama: Llama, drafter: ReferenceDrafter, prompts: list[list[int]], settings: Settings
) -> dict[str, Measured]:
    """Continue every prompt with every sampling, and draft at each token."""
    rows, firsts = continue_prompts(llama, prompts, settings)
    block_size = drafter.config.block_size
    found = {}
    for i, sampling in enumerate(SAMPLINGS):
        found[sampling.name] = Measured(
            [], [], Counter(), torch.zeros(len(TOP), block_size - 1), torch.zeros(block_size - 1)
        )
        of_sampling = slice(i * len(prompts), (i + 1) * len(prompts))
        for tokens, first in zip(rows[of_sampling].split(BATCH), firsts[of_sampling].split(BATCH), strict=True):
            measure_batch(llama, drafter, tokens, first, settings.eval_tokens, found[sampling.name])
    return found


def continue_prompts(llama: Llama, prompts: list[list[int]], settings: Settings) -> tuple[Tensor, Tensor]:
    """tokens [samplings * prompts, length] int64 and the first generated position of each [samplings * prompts]."""
    longest, shortest = max(map(len, prompts)), min(map(len, prompts))
    num_prompts = len(prompts)
    rows = Rows(llama, len(SAMPLINGS) * num_prompts, longest + settings.eval_tokens)
    for i, prompt in enumerate(prompts):
        rows.tokens[i::num_prompts, : len(prompt)] = torch.tensor(prompt, device=llama.device)
        rows.given[i::num_prompts, : len(prompt)] = True
    firsts = torch.tensor([len(prompt) for prompt in prompts], device=llama.device).repeat(len(SAMPLINGS))
    temperatures = torch.tensor([sampling.temperature for sampling in SAMPLINGS], device=llama.device)

    def choose(logits: Tensor) -> Tensor:
        for i, sampling in enumerate(SAMPLINGS):
            if sampling.top_k:
                of_sampling = slice(i * num_prompts, (i + 1) * num_prompts)
                logits[of_sampling] = keep_top(logits[of_sampling], sampling)
        return sample(logits, temperatures.repeat_interleave(num_prompts))

    rows.start(shortest)
    run_steps(lambda: rows.step(choose), longest + settings.eval_tokens - shortest, "continue")
    return rows.tokens, firsts


def keep_top(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [N, vocab] without what top_k and then top_p leave out."""
    values, tokens = logits.topk(sampling.top_k)
    chances = (values / sampling.temperature).softmax(-1)
    is_out = chances.cumsum(-1) - chances >= sampling.top_p
    return torch.full_like(logits, -math.inf).scatter(1, tokens, values.masked_fill(is_out, -math.inf))


@torch.no_grad()
def measure_batch(
    llama: Llama, drafter: ReferenceDrafter, tokens: Tensor, first: Tensor, num_tokens: int, found: Measured
) -> None:
    """Draft at each of `num_tokens` generated tokens, from position `first` [N] on, of tokens [N, T]."""
    block_size = drafter.config.block_size
    anchors = first[:, None] + torch.arange(num_tokens, device=tokens.device)
    features = llama.features(tokens, drafter.config.target_layer_ids)
    # The last blocks reach beyond the text.
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
    num_correct = ((ranks == 0) & counts).cumprod(-1).sum(-1)
    own_labels = labels.masked_fill(~counts, -1).flatten(0, 1)
    texts = torch.arange(len(tokens), device=tokens.device).repeat_interleave(num_tokens)
    blocks = (logits.flatten(0, 1), own_labels, texts, (anchors + 1).flatten())
    parts = zip(*(rows.split(TREE_BATCH) for rows in blocks), strict=True)
    of_trees = torch.cat(
        [
            num_correct_in_trees(of_part, wanted, tokens[text], lens, TREES, CANDIDATES)
            for of_part, wanted, text, lens in parts
        ],
        dim=1,
    )
    num_correct = torch.cat([num_correct[None], of_trees.view(len(TREES), *num_correct.shape)])
    found.num += counts.sum((0, 1)).cpu()
    for i, top in enumerate(TOP):
        found.hits[i] += ((ranks < top) & counts).sum((0, 1)).cpu()
    for length, *correct in zip(lengths.tolist(), *num_correct.tolist(), strict=True):
        if length < 2:
            continue
        found.tokens.append(length - 1)
        committed = [walk(length, of_kind) for of_kind in correct]
        found.cycles.append([len(of_kind) for of_kind in committed])
        found.lengths.update(committed[0])


def summarize(parts: list[Measured]) -> dict:
    """Tokens per cycle with the standard error over prompts, and the rest of :class:`Measured`, of all processes."""
    tokens = torch.tensor([n for part in parts for n in part.tokens], dtype=torch.float64)
    cycles = torch.tensor([n for part in parts for n in part.cycles], dtype=torch.float64)
    (mean, error), *of_trees = (ratio(tokens, of_kind) for of_kind in cycles.T)
    hits, num = sum(part.hits for part in parts), sum(part.num for part in parts)
    return {
        "prompts": len(tokens),
        "tokens": int(tokens.sum()),
        "cycles": int(cycles[:, 0].sum()),
        "tokens_per_cycle": mean,
        "standard_error": error,
        "of_trees": {str(num_nodes): list(of_kind) for num_nodes, of_kind in zip(TREES, of_trees, strict=True)},
        "cycles_that_commit": dict(sorted(sum((part.lengths for part in parts), Counter()).items())),
        "right_token_in_first": {
            str(top): [round(share, 3) for share in (of_top / num.clamp(min=1)).tolist()]
            for top, of_top in zip(TOP, hits, strict=True)
        },
    }
