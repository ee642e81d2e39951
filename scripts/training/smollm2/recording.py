"""Record stage: the drafts at each token of greedy answers, with which benchmarks simulate this pair.

A server with dummy weights that reads the file drafts, verifies and accepts as this pair does on these answers
(`sglang_dflash.engine.simulate.RecordedDrafts`, which states the format).
"""

import json

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from support.oracle.drafter import ReferenceDrafter
from torch import Tensor

from training.blocks import draft_blocks
from training.cycles import walk
from training.smollm2.conversations import load_tokenizer
from training.smollm2.decoder import Rows, run_steps
from training.smollm2.llama import Llama, head_logits
from training.smollm2.settings import TURN_END_ID, Settings

CANDIDATES = 16
# Shorter answers are left out.
MIN_TOKENS = 32


def run(settings: Settings) -> None:
    """Write `work/recorded_drafts.safetensors` of the shipped prompts, an equal share of each kind."""
    tokenizer = load_tokenizer(settings)
    llama = Llama(settings.target_dir, settings.device)
    drafter = ReferenceDrafter.from_pretrained(settings.drafter_dir).to(settings.device)
    kinds = json.loads((settings.out / "prompts.json").read_text(encoding="utf-8"))
    share = -(-settings.recorded_prompts // len(kinds))
    texts = [text for of_kind in kinds.values() for text in of_kind[:: max(1, len(of_kind) // share)][:share]]
    messages = [[{"role": "user", "content": text}] for text in texts]
    chats = [tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in messages]
    prompts = sorted((tokenizer.encode(chat) for chat in chats), key=len)
    num_tokens, depths = settings.recorded_tokens, drafter.config.block_size - 1
    rows = answer(llama, prompts, num_tokens + depths + 1)
    firsts = [len(prompt) for prompt in prompts]
    records = [record(llama, drafter, row, first, num_tokens) for row, first in zip(rows, firsts, strict=True)]
    records = [of_prompt for of_prompt in records if of_prompt["num_tokens"] >= MIN_TOKENS]
    tensors = {name: torch.stack([of_prompt[name] for of_prompt in records]) for name in records[0]}
    kept = typical(chain_walks(tensors), settings.recorded_length)
    tensors = {name: tensor[kept].contiguous() for name, tensor in tensors.items()}
    length = chain_length(chain_walks(tensors))
    save_file(tensors, settings.work / "recorded_drafts.safetensors", metadata={"tokens_per_cycle": f"{length:.3f}"})
    print(f"{len(kept)} answers; chains commit {length:.3f} tokens per cycle", flush=True)


def answer(llama: Llama, prompts: list[list[int]], num_tokens: int) -> Tensor:
    """Return prompts, shortest first, each with the next `num_tokens` tokens or more: [len(prompts), T] int64."""
    shortest, longest = len(prompts[0]), len(prompts[-1])
    rows = Rows(llama, len(prompts), longest + num_tokens)
    for i, prompt in enumerate(prompts):
        rows.tokens[i, : len(prompt)] = torch.tensor(prompt, device=llama.device)
        rows.given[i, : len(prompt)] = True
    rows.start(shortest)
    run_steps(lambda: rows.step(lambda logits: logits.argmax(-1)), longest + num_tokens - shortest, "answer")
    return rows.tokens


@torch.no_grad()
def record(llama: Llama, drafter: ReferenceDrafter, tokens: Tensor, first: int, num_tokens: int) -> dict[str, Tensor]:
    """Draft at each of the first `num_tokens` tokens of an answer.

    Args:
        tokens: [T] int64. A prompt and its answer.
        first: the answer's first position.
    """
    depths = drafter.config.block_size - 1
    tokens = tokens[: first + num_tokens + depths + 1]
    answer = tokens[first:]
    is_end = answer == TURN_END_ID
    end = int(is_end.int().argmax()) + 1 if is_end.any() else len(answer)

    anchors = torch.arange(first, first + num_tokens, device=llama.device)[None]
    features = llama.features(tokens[None], drafter.config.target_layer_ids)
    hidden = draft_blocks(drafter, llama.embedding, features, tokens[None], anchors)
    logits = head_logits(hidden.to(llama.embedding.dtype).flatten(0, -2), llama.embedding)
    values, candidates = F.log_softmax(logits.float(), -1).topk(CANDIDATES)
    shape = (num_tokens, depths, CANDIDATES)
    return {
        "answers": answer.masked_fill(torch.arange(len(answer), device=llama.device) >= end, -1).int().cpu(),
        # A cycle begins at a token that has another one after it.
        "num_tokens": torch.tensor(min(num_tokens, end - 1)),
        "candidates": candidates.view(shape).to(torch.uint16).cpu(),
        "sixteenths": (values * -16).round().clamp(0, 255).view(shape).to(torch.uint8).cpu(),
    }


def chain_walks(tensors: dict[str, Tensor]) -> list[list[int]]:
    """Return the tokens that each cycle of chains commits, of each answer."""
    walks, best = [], tensors["candidates"][..., 0].to(torch.int32)
    for text, num_tokens, drafts in zip(tensors["answers"], tensors["num_tokens"].tolist(), best, strict=True):
        labels = text[1:].unfold(0, drafts.shape[1], 1)[:num_tokens]
        correct = (drafts[:num_tokens] == labels).int().cumprod(-1).sum(-1)
        walks.append(walk(num_tokens + 1, correct.tolist()))
    return walks


def chain_length(walks: list[list[int]]) -> float:
    """Return tokens over cycles of all answers."""
    return sum(map(sum, walks)) / sum(map(len, walks))


def typical(walks: list[list[int]], length: float) -> list[int]:
    """Return the answers that are left when single ones are left out until `length` is as close as it gets.

    A few dozen answers have another acceptance length than hundreds.
    """
    kept = list(range(len(walks)))

    def distance(indices: list[int]) -> float:
        return abs(chain_length([walks[i] for i in indices]) - length)

    while len(kept) > 1:
        fewer = min(([i for i in kept if i != out] for out in kept), key=distance)
        if distance(fewer) >= distance(kept):
            break
        kept = fewer
    return kept
