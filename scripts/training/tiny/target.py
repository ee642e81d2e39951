"""Target stages: train the target on the corpus, and let it continue corpus prompts for the drafter."""

import math
import time

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from training.files import save_checkpoint, write_json
from training.loop import step_generator, train
from training.tiny.settings import EOS_ID, GENERATE_STAGE, TARGET_STAGE, Settings


def run_training(settings: Settings) -> None:
    """Train the target in float32 with bf16 autocast and write it, rounded to bf16, to `out/target`."""
    torch.manual_seed(settings.seed)
    config = AutoConfig.for_model(**settings.target_config | {"dtype": "float32", "torch_dtype": "float32"})
    model = AutoModelForCausalLM.from_config(config)
    initialize_decays(model)
    model = model.to(settings.device)
    train_tokens = load_tokens(settings, "train_tokens.pt")
    held_out_tokens = load_tokens(settings, "held_out_tokens.pt")

    def loss_at(step: int) -> Tensor:
        generator = step_generator(settings.seed, TARGET_STAGE, step, settings.device)
        windows = random_windows(train_tokens, settings.target_batch, settings.sequence_length + 1, generator)
        return next_token_loss(model, windows, settings.device)

    def evaluate() -> dict[str, float]:
        length = settings.sequence_length + 1
        windows = held_out_tokens[: len(held_out_tokens) // length * length].view(-1, length).long()
        batches = windows.split(settings.target_batch)[: settings.held_out_batches]
        losses = [next_token_loss(model, batch, settings.device) for batch in batches]
        sizes = torch.tensor([len(batch) for batch in batches], dtype=torch.float32)
        return {"loss": float((torch.stack(losses).cpu() * sizes).sum() / sizes.sum())}

    def save() -> None:
        weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        save_checkpoint(settings.target_dir, settings.target_config, weights)

    train("target", model, loss_at, evaluate, save, settings.target, settings.work)
    generation_config = {"bos_token_id": EOS_ID, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID}
    write_json(settings.target_dir / "generation_config.json", generation_config)


def run_generation(settings: Settings) -> None:
    """Write `work/generated.pt`: greedy continuations of corpus prompts by the target, in the dtype of serving.

    Every batch has one prompt length, so there is no padding. Generation continues after EOS: the target then starts a
    new document, as in its training stream, and the drafter learns that too.
    """
    target = load_served_target(settings)
    train_tokens = load_tokens(settings, "train_tokens.pt")
    length = settings.generated_length
    prompt_lengths = torch.linspace(length // 16, length * 5 // 8, settings.generation_batches).long()
    # Shuffle the lengths, so that a run that reaches its time limit has short and long prompts.
    order = torch.randperm(settings.generation_batches, generator=torch.Generator().manual_seed(settings.seed))

    sequences, prompt_sizes = [], []
    started = time.monotonic()
    for index, prompt_length in enumerate(tqdm(prompt_lengths[order].tolist(), desc="generate")):
        generator = step_generator(settings.seed, GENERATE_STAGE, index, settings.device)
        prompts = prompt_windows(train_tokens, settings.generation_batch, prompt_length, generator)
        sequences.append(continue_greedily(target, prompts, length).to("cpu", torch.int16))
        prompt_sizes.append(torch.full((len(prompts),), prompt_length))
        if time.monotonic() - started > settings.generation_seconds:
            break
    generated = {"tokens": torch.cat(sequences), "prompt_lengths": torch.cat(prompt_sizes)}
    torch.save(generated, settings.work / "generated.pt")
    print(f"generated: {len(generated['tokens']):,} sequences in {time.monotonic() - started:.0f} s")


def initialize_decays(model: PreTrainedModel) -> None:
    """Initialise the steps of recurrent layers between 0.001 and 0.1: some heads forget in a few tokens, others slowly.

    The slow ones remember thousands of tokens. Source: Mamba 2 (Dao and Gu, arXiv 2405.21060). The default of
    transformers is 1.3, with which most heads forget everything at every token.
    """
    for name, weight in model.named_parameters():
        if name.endswith("dt_bias"):
            steps = torch.empty_like(weight).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            # The inverse of softplus.
            weight.data = steps + torch.log(-torch.expm1(-steps))


def load_tokens(settings: Settings, name: str) -> Tensor:
    """Return a token stream of the corpus stage on the device: [total tokens] int16."""
    return torch.load(settings.work / name, weights_only=True).to(settings.device)


def load_served_target(settings: Settings) -> PreTrainedModel:
    """Return the written target, frozen, with its bf16 weights. It computes in bf16 on a GPU, in float32 on a CPU."""
    dtype = torch.bfloat16 if settings.device == "cuda" else torch.float32
    target = AutoModelForCausalLM.from_pretrained(settings.target_dir, dtype=dtype)
    return target.to(settings.device).eval().requires_grad_(False)


def random_windows(tokens: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Return `count` windows at random offsets of the stream: [count, length] int64."""
    starts = torch.randint(len(tokens) - length, (count,), generator=generator, device=tokens.device)
    return gather_windows(tokens, starts, length)


def prompt_windows(tokens: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Return windows as `random_windows` does, but every second one starts at the start of a document."""
    document_starts = (tokens[:-length] == EOS_ID).nonzero().flatten() + 1
    picks = torch.randint(len(document_starts), (count,), generator=generator, device=tokens.device)
    anywhere = torch.randint(len(tokens) - length, (count,), generator=generator, device=tokens.device)
    at_document = torch.arange(count, device=tokens.device) % 2 == 0
    return gather_windows(tokens, torch.where(at_document, document_starts[picks], anywhere), length)


def gather_windows(tokens: Tensor, starts: Tensor, length: int) -> Tensor:
    """Return windows of tokens [total] at starts [count]: [count, length] int64."""
    return tokens[starts[:, None] + torch.arange(length, device=tokens.device)].long()


def next_token_loss(model: PreTrainedModel, windows: Tensor, device: str) -> Tensor:
    """Return the mean cross entropy of windows [bs, length + 1] int64, each token predicted from those before."""
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.inference_mode()
def continue_greedily(target: PreTrainedModel, prompts: Tensor, length: int) -> Tensor:
    """Return the prompts [bs, prompt length] with their greedy continuations: [bs, length] int64."""
    # The target creates the cache, because its type depends on the target's layers.
    cache = None
    tokens, step_ids = [prompts], prompts
    for _ in range(length - prompts.shape[1]):
        output = target(input_ids=step_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        step_ids = output.logits[:, -1:].argmax(-1)
        tokens.append(step_ids)
    return torch.cat(tokens, dim=1)
